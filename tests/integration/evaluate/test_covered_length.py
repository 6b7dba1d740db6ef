"""The length that a verdict on long documents covers."""

from pathlib import Path
from typing import Any

import pytest
from helpers.engines.conformance import conformance_config
from helpers.engines.random_llama import BY_NAME, make_engine, tiny_decoder
from helpers.verdicts.evaluations import evaluate, measure_baseline
from helpers.verdicts.reports import gates

from stages.evaluate.inputs.lengths import fit_lengths
from stages.evaluate.inputs.samples import load_samples
from stages.evaluate.inputs.tokens import BundleTokenizer
from stages.verdict.gates import decide
from stages.verdict.report import load_rows
from stages.workloads.documentation import pages


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
