"""Properties of every cache format, tested with the reference engine's formulas, and formats of vLLM and llama.cpp.

All formats store every drawn tensor. test_onnx_*.py compare the ONNX engine's codes with the reference engine's,
tests/real_vllm/test_vllm_codes.py vLLM's own kernels, tests/real_llamacpp/test_llamacpp_engine.py ggml.
Legend: H KV heads, T tokens, D head_dim.
"""

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from helpers.policies import ggml
from helpers.policies.formats import DYNAMIC, FORMATS, QUANTIZED, Trial, fitting, name, tensors, tried
from helpers.policies.ggml import form_of
from hypothesis import given, settings
from torch import Tensor

from pipeline.chain.inputs import check_inputs
from pipeline.config.compose import plan
from stages.core.errors import UserError
from stages.engines.reference.formats import dequantize, quantize
from stages.policies.arithmetic_torch import Options, Static
from stages.policies.ggml.arithmetic_torch import round_queries
from stages.policies.nvfp4.arithmetic_torch import ARITHMETIC as NVFP4_ARITHMETIC
from stages.policies.spec import MIN_SCALE
from stages.verdict.conformance import E4M3_SCALE_STEP

examples = settings(max_examples=25, derandomize=True, deadline=None)

MANTISSA_BITS = {"fp16": 10, "bf16": 7, "fp8_e4m3": 3, "fp8_e5m2": 2, "nvfp4": 1}
SMALLEST_EXPONENT = {"fp16": -14, "bf16": -126, "fp8_e4m3": -6, "fp8_e5m2": -14, "nvfp4": 0}


def half_ulp(x: Tensor, dtype: str) -> Tensor:
    """Return half the distance between neighbouring floating-point codes at the magnitude of x."""
    exponent = x.abs().double().clamp(min=1e-300).log2().floor().clamp(min=SMALLEST_EXPONENT[dtype])
    return torch.exp2(exponent - MANTISSA_BITS[dtype] - 1)


def allowed_error(trial: Trial) -> Tensor:
    """Return half a step (integers) or half an ulp (floats), plus the part beyond the limit of static scales.

    The rounding of float32 itself is added: of code * scale + zero and, if rotated, of the matrix product.
    """
    form, x = trial.form, trial.x_HTD.double()
    step = trial.step_HTD.double()
    if form.exact:
        return half_ulp(x, form.dtype)
    if form.code.kind == "float":
        steps = x / step
        rounded = half_ulp(steps.clamp(-form.code.limit, form.code.limit), form.dtype)
        allowed = step * (rounded + (steps.abs() - form.code.limit).clamp(min=0.0))
    else:
        allowed = step / 2
    norm = x.norm(dim=-1, keepdim=True) if form.rotation == "hadamard" else 0.0
    return allowed * (1 + 2.0**-12) + 2.0**-23 * (x.abs() + trial.zero_HTD.abs()) + 2.0**-19 * norm


@examples
@given(x_HTD=tensors())
def test_numbers_come_back_within_half_a_step(x_HTD: Tensor) -> None:
    heads, tokens, dim = x_HTD.shape
    for form in fitting(FORMATS, dim):
        trial = tried(x_HTD, form)
        error = (trial.back_HTD.double() - trial.x_HTD.double()).abs()
        assert (error <= allowed_error(trial)).all(), name(form)
        parts = (trial.stored.codes, trial.stored.scale, trial.stored.zero)
        assert sum(part.nbytes for part in parts if part is not None) == heads * tokens * form.token_bytes(dim), name(form)


@pytest.mark.parametrize("number", [2.0**-149, 2.0**-126, 2.0**-24, 2.0**-15, 65504.0, 65480.0])
def test_the_smallest_and_the_largest_numbers_come_back_finite(number: float) -> None:
    """A rotation adds 64 large numbers, and a zero is rounded down: float16 scales and zeros must saturate, not overflow."""
    signs = torch.tensor([1.0, -1.0, 0.5, 0.0]).repeat(16)
    x_HTD = torch.stack([number * signs, torch.full((64,), number), torch.full((64,), -number)])[None]
    for form in fitting(DYNAMIC if number > 1 else QUANTIZED, 64):
        trial = tried(x_HTD, form)
        assert trial.back_HTD.isfinite().all(), name(form)
        if number < 1 and form.scale != "uncalibrated":
            assert (trial.back_HTD - trial.x_HTD).abs().max() <= MIN_SCALE / 2 * (1 + 2.0**-10), name(form)


def test_conformance_allows_one_step_of_a_blocks_scale() -> None:
    vectors = torch.randn(1, 4000, 64, generator=torch.Generator().manual_seed(0))
    first = vectors[..., :16].abs().amax(-1, keepdim=True)
    vectors *= 6 * (1 + 1 / 16) / first  # halfway between the scales 1 and 1 + 1 / 8
    static, options = Static(torch.ones(1, 1, 1), None), Options(groups=4, symmetric=True)

    def errors(nudge: float) -> Tensor:
        blocks = vectors.clone()
        blocks[..., :16] *= nudge
        stored = NVFP4_ARITHMETIC.store(blocks, static, options)
        error: Tensor = (NVFP4_ARITHMETIC.numbers(stored, static, options) - vectors).norm(dim=-1)
        return error

    moved = (errors(1 + 1e-6) - errors(1 - 1e-6)).abs() / vectors.norm(dim=-1)
    assert 2**-6 < moved.max() < E4M3_SCALE_STEP


def test_hadamard_64_rotates_blocks_of_64_and_is_inverted() -> None:
    x = torch.randn(1, 3, 128, generator=torch.Generator().manual_seed(1))
    blocks = form_of("q8_0", "hadamard_64")
    halves = [quantize(part, form_of("q8_0", "hadamard"), None) for part in x.chunk(2, dim=-1)]
    assert torch.equal(quantize(x, blocks, None).codes, torch.cat([half.codes for half in halves], dim=-1))
    assert (dequantize(quantize(x, blocks, None), blocks, None) - x).abs().max() < 0.05


def test_queries_are_rounded_to_blocks_of_8_bits() -> None:
    x = ggml.vectors()
    expected = quants.dequantize(quants.quantize(x.numpy(), GGMLQuantizationType.Q8_0), GGMLQuantizationType.Q8_0)
    assert np.abs(round_queries(x).numpy() - expected).max() <= np.abs(x.numpy()).max() / 127
    assert (round_queries(x).numpy() != expected).mean() < 2e-3


@pytest.mark.parametrize(
    ("backend", "kv", "message"),
    [
        ("onnxruntime", "vllm_int4", r"arithmetic=vllm_\w+: .*; use backend=torch .* kv\.key\.rotation=hadamard$"),
        ("tensorrt_rtx", "vllm_int8", r"arithmetic=vllm_\w+: .*; use backend=torch .*, or set kv\.key\.arithmetic=kvgate$"),
        ("onnxruntime", "llamacpp_q4_0", r"dtype=q4_0: .*; use backend=torch backend\.device=cpu, or"),
    ],
)
def test_graphs_refuse_and_name_reference_only_formats(backend: str, kv: str, message: str) -> None:
    (job,) = plan([f"backend={backend}", f"kv={kv}"], multirun=False).jobs
    with pytest.raises(UserError, match=rf"^kv\.key\.{message}"):
        check_inputs(job)
