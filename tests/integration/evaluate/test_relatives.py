"""The report names the near relative of a policy that an engine actually computes."""

from pathlib import Path

import pytest
import torch
from conformance_cases import POLICIES, Conformity, compare
from onnx_fixtures import static_scales

from stages.engines.reference.engine import TorchEngine
from stages.engines.reference.formats import dequantize, quantize
from stages.evaluate.conformance.engine import ReferenceEngine
from stages.evaluate.conformance.explanation import relatives
from stages.policies.arithmetic_torch import Static
from stages.policies.policy import Side
from stages.policies.scales import KVScales


@pytest.fixture(scope="module")
def bench(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Conformity:
    return Conformity(tiny_checkpoint, tmp_path_factory)


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
def test_what_an_engine_computes_instead_is_named(name: str, what: str, bench: Conformity) -> None:
    reference = torch_engine(bench, name)
    engine = dict(relatives(reference))[what]
    engine.policy = reference.policy
    long = max(bench.encoded, key=lambda item: len(item.prompt))
    result = compare(engine, ReferenceEngine(reference, "float32"), [long], 1)
    assert result.explanation is not None
    assert result.explanation.what == what
    assert result.explanation.kl < 1e-9


def test_a_fault_like_no_relative_is_not_explained(bench: Conformity) -> None:
    reference, engine = torch_engine(bench, "int8"), torch_engine(bench, "int8")
    engine.storages[1][Side.KEY].gain = torch.tensor([2.0, 1.0])[:, None, None]  # one head of one layer
    result = compare(engine, ReferenceEngine(reference, "float32"), bench.encoded[:1], 1)
    assert result.deviation is not None
    assert result.explanation is None


@pytest.mark.parametrize("dtype", ["fp8", "int8", "int4_g32"])
def test_codes_towards_zero_are_never_larger_and_the_next_code_is_too_large(dtype: str) -> None:
    form = POLICIES[dtype].key
    x = torch.randn(2, 50, 64, generator=torch.Generator().manual_seed(0))
    static = Static(torch.full((1, 1, 1), 0.01), None) if form.static else None
    down = dequantize(quantize(x, form, static, towards_zero=True), form, static)
    near = dequantize(quantize(x, form, static), form, static)
    assert (down.abs() <= x.abs() * (1 + 1e-5)).all()
    assert ((down == near) | (near.abs() > down.abs())).all()
    assert (down != near).float().mean() > 0.3
