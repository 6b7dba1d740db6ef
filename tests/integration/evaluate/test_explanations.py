"""Known mistakes that explain a deviating engine, and the length that a verdict on long documents covers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.engines.conformance import POLICIES, Conformity, compare, conformance_config
from helpers.engines.random_llama import BY_NAME, make_engine, static_scales, tiny_decoder
from helpers.verdicts.evaluations import evaluate, measure_baseline
from helpers.verdicts.reports import gates

from stages.engines.reference.engine import TorchEngine
from stages.engines.reference.formats import dequantize, quantize
from stages.evaluate.conformance.comparer import ReferenceEngine
from stages.evaluate.conformance.comparison import faulty_references
from stages.evaluate.inputs.lengths import fit_lengths
from stages.evaluate.inputs.samples import load_samples
from stages.evaluate.inputs.tokens import BundleTokenizer
from stages.policies.arithmetic_torch import Static
from stages.policies.policy import Side
from stages.policies.scales import KVScales
from stages.verdict.gates import decide
from stages.verdict.report import load_rows
from stages.workloads.documentation import pages


def torch_engine(bench: Conformity, name: str) -> TorchEngine:
    policy, plain = POLICIES[name], TorchEngine.from_model(bench.model, POLICIES["fp16"])
    calibrated = static_scales(policy, plain.shape)
    # Every layer has different scales, and its values have other scales than its keys.
    layers = tuple(
        {
            side: scales.model_copy(
                update={"scale": tuple(v * (1.0 + 0.5 * n + (1.0 if side.base is Side.VALUE else 0.0)) for v in scales.scale)}
            )
            for side, scales in layer.items()
        }
        for n, layer in enumerate(calibrated.layers)
    )
    return TorchEngine.from_model(bench.model, policy, KVScales(layers=layers))


CASES = [
    ("int8", "keys and values are not quantized"),
    ("fp8", "codes are rounded towards zero"),
    ("fp8", "every static scale is 1.0"),
]


@pytest.mark.parametrize(("name", "what"), CASES)
def test_a_known_mistake_explains_a_deviating_engine(name: str, what: str, bench: Conformity) -> None:
    reference = torch_engine(bench, name)
    engine = dict(faulty_references(reference))[what]
    engine.policy = reference.policy
    long = max(bench.encoded, key=lambda item: len(item.prompt))
    result = compare(engine, ReferenceEngine(reference), [long], 1)
    assert result.explanation is not None
    assert result.explanation.what == what
    assert result.explanation.kl < 1e-9


def test_a_fault_that_matches_no_known_mistake_is_not_explained(bench: Conformity) -> None:
    reference, engine = torch_engine(bench, "int8"), torch_engine(bench, "int8")
    engine.storages[1][Side.KEY].gain = torch.tensor([2.0, 1.0])[:, None, None]  # one head of one layer
    result = compare(engine, ReferenceEngine(reference), bench.encoded[:1], 1)
    assert result.deviation is not None
    assert result.explanation is None


@pytest.mark.parametrize("dtype", ["fp8", "int8", "int4_g32"])
def test_codes_rounded_towards_zero_never_exceed_the_value(dtype: str) -> None:
    form = POLICIES[dtype].key
    x = torch.randn(2, 50, 64, generator=torch.Generator().manual_seed(0))
    static = Static(torch.full((1, 1, 1), 0.01), None) if form.static else None
    down = dequantize(quantize(x, form, static, towards_zero=True), form, static)
    near = dequantize(quantize(x, form, static), form, static)
    assert (down.abs() <= x.abs() * (1 + 1e-5)).all()
    assert ((down == near) | (near.abs() > down.abs())).all()
    assert (down != near).float().mean() > 0.3


def test_a_verdict_on_the_users_texts_covers_their_length(
    tiny_checkpoint: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text(" ".join(word for page in pages("train") for paragraph in page for word in paragraph.split()))
    cheap: dict[str, Any] = {"conformance_samples": 0, "noise_samples": 1, "max_scored_tokens": 16}
    config = conformance_config(samples={}, lengths=[1216], length_documents=1, documents=str(texts), **cheap)
    tokenizer, decoder = BundleTokenizer(tiny_checkpoint), tiny_decoder(tmp_path_factory, tiny_checkpoint)
    samples, stored = fit_lengths(load_samples(config), tokenizer, config), tmp_path / "baseline"
    fp16, int8 = (make_engine(decoder, tmp_path / name, BY_NAME[name]) for name in ("fp16", "int8"))
    measure_baseline(lambda: fp16, samples, stored, tokenizer=tokenizer, config=config)
    report = evaluate(lambda: int8, samples, stored, tmp_path, tokenizer=tokenizer, config=config)
    assert report.limits is not None
    assert report.limits.tokens is not None
    assert 0.9 * 1216 < report.limits.tokens <= report.limits.room <= 1216  # type: ignore[operator]
    verdict = decide(report, load_rows(tmp_path), gates(min_samples=1, min_baseline_probability=1e-30))
    assert verdict.status == "INCONCLUSIVE"
    assert f"up to {report.limits.tokens:,} tokens" in str(verdict.covered)
    assert {check.where for check in verdict.checks if check.gate == "min_recovery"} == {"all", "long_1216"}
