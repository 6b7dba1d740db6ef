"""Formats of vLLM and llama.cpp in the reference engine, against their definition number by number and the package gguf.

tests/real_vllm/test_vllm_codes.py compares with vLLM's own kernels, tests/real_llamacpp/test_llamacpp_engine.py with ggml.
"""

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from helpers.policies import ggml
from helpers.policies.ggml import form_of
from helpers.policies.shipped import SHIPPED
from pydantic import ValidationError
from torch import Tensor

from pipeline.chain.inputs import check_inputs
from pipeline.config.compose import plan
from stages.core.errors import UserError
from stages.engines.reference.formats import dequantize, quantize
from stages.policies.arithmetic_torch import Stored
from stages.policies.formats import Format
from stages.policies.ggml.arithmetic_torch import round_queries
from stages.policies.vllm_token_head.arithmetic_torch import random_signs

K8V4, INT4 = SHIPPED["vllm_k8v4"], SHIPPED["vllm_int4"]
V4, Q4_0 = K8V4.value, form_of("q4_0")


def vectors() -> Tensor:
    """Return the vectors of ggml's tests, (2, 12, 64), some with ties."""
    x = ggml.vectors()
    x[:, 4] = torch.arange(64) % 31 * 0.5
    return x


def unpacked(stored: Stored) -> Tensor:
    """Return codes from 0 up, unpacked from bytes."""
    byte = stored.codes.to(torch.int16)
    return torch.cat([byte & 15, (byte >> 4) + 8], dim=-1)


def test_turboquant_values_round_half_up_in_the_exact_range() -> None:
    x, levels = vectors(), 15
    stored = quantize(x, K8V4.value, None)
    assert stored.scale is not None
    assert stored.zero is not None
    for vector, codes, scale, zero in zip(
        x.flatten(0, 1).numpy(),
        unpacked(stored).flatten(0, 1).numpy(),
        stored.scale.flatten().numpy(),
        stored.zero.flatten().numpy(),
        strict=True,
    ):
        low, high = vector.min(), vector.max()
        step = max(np.float32(high - low) / np.float32(levels), np.float32(1e-8))
        expected = [min(int(np.float32((number - low) / step) + np.float32(0.5)), levels) for number in vector]
        assert codes.tolist() == expected
        assert (scale, zero) == (np.float16(step), np.float16(low))
    numbers = unpacked(stored) * stored.scale.float() + stored.zero.float()
    torch.testing.assert_close(dequantize(stored, K8V4.value, None), numbers)
    assert stored.codes.shape[-1] == 32


def test_token_head_keeps_its_zero_in_the_scales_low_bits() -> None:
    x = vectors()
    stored = quantize(x, INT4.value, None)
    assert stored.scale is not None
    assert stored.zero is None
    assert stored.scale.dtype == torch.float32
    matrix = np.ones((1, 1))
    while len(matrix) < 64:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    rotated = (x * random_signs(64)).double().numpy() @ matrix
    scale = np.maximum((rotated.max(-1) - rotated.min(-1)) / 15, 1e-6)
    zero = np.clip(np.floor(-rotated.min(-1) / scale + 0.5), 0, 15)
    bits = stored.scale[..., 0].numpy().view(np.int32)
    varies = rotated.std(-1) > 1e-3  # otherwise the sums are only rounding errors
    assert (bits & 15)[varies].tolist() == zero[varies].astype(int).tolist()
    np.testing.assert_allclose((bits & -16).view(np.float32)[varies], scale[varies], rtol=2e-5)
    steps = rotated / scale[..., None] + zero[..., None]
    off = np.abs(unpacked(stored).numpy() - np.clip(steps, 0, 15))
    assert off[varies].max() <= 0.5 + 1e-3
    back = dequantize(stored, INT4.value, None).double().numpy()
    expected = ((unpacked(stored).numpy() - zero[..., None]) * scale[..., None]) @ matrix / 64 * random_signs(64).numpy()
    np.testing.assert_allclose(back[varies], expected[varies], atol=1e-4 * np.abs(x.numpy()).max())


@pytest.mark.parametrize("name", ggml.NAMES)
def test_ggufs_reader_reads_the_same_numbers(name: str) -> None:
    form = form_of(name)
    stored = quantize(ggml.vectors(), form, None)
    bytes_ = ggml.raw(stored)
    assert bytes_.shape[-1] == form.token_bytes(64)
    expected = quants.dequantize(bytes_, GGMLQuantizationType[name.upper()])
    np.testing.assert_array_equal(dequantize(stored, form, None).numpy(), expected)


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
    ("form", "changed", "message"),
    [
        (V4, {"symmetric": True}, "symmetric must be false, got true, .* arithmetic=vllm_turboquant"),
        (V4, {"dtype": "int8"}, "dtype must be int4 with arithmetic=vllm_turboquant, got int8"),
        (V4, {"arithmetic": "vllm_token_head"}, "rotation must be signed_hadamard, got none"),
        (V4, {"arithmetic": "kvgate", "rotation": "signed_hadamard"}, "rotation must be none or hadamard, got"),
        (V4, {"arithmetic": "vllm"}, "arithmetic"),
        (Q4_0, {"group_size": 64}, "group_size must be 32, got 64"),
        (Q4_0, {"symmetric": False}, "symmetric must be true"),
        (Q4_0, {"scale": "calibrated"}, "scale must be dynamic"),
        (Q4_0, {"dtype": "int4", "rotation": "hadamard_64"}, "rotation must be none or hadamard, got hadamard_64"),
    ],
)
def test_a_format_that_an_engine_does_not_have_is_refused(form: Format, changed: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Format.model_validate(form.model_dump() | changed)


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
