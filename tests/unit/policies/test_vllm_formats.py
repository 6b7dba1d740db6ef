"""vLLM's formats in the reference engine, compared with their definition written number by number.

tests/real_vllm/test_vllm_codes.py makes the same comparison with vLLM's own kernels.
"""

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from shipped import SHIPPED
from torch import Tensor

from pipeline.chain.inputs import check_inputs
from pipeline.config.compose import plan
from stages.core.errors import UserError
from stages.engines.reference.formats import dequantize, quantize
from stages.policies.arithmetic_torch import Stored
from stages.policies.formats import Format
from stages.policies.vllm_token_head.arithmetic_torch import signs

K8V4, INT4 = SHIPPED["vllm_k8v4"], SHIPPED["vllm_int4"]


def vectors() -> Tensor:
    """Return vectors (2, 12, 64): random at many magnitudes, of one sign, constant, zero, and with ties."""
    x = torch.randn(2, 12, 64, generator=torch.Generator().manual_seed(0)) * torch.exp2(torch.arange(12.0) - 6)[:, None]
    x[:, 0], x[:, 1] = 0.0, 0.25
    x[:, 2] += 100
    x[:, 3] -= 3000
    x[:, 4] = torch.arange(64) % 31 * 0.5
    return x


def unpacked(stored: Stored) -> Tensor:
    """Return codes from 0 up, unpacked from bytes."""
    byte = stored.codes.to(torch.int16)
    return torch.cat([byte & 15, (byte >> 4) + 8], dim=-1)


def test_turboquant_values_are_rounded_half_up_from_the_unrounded_range() -> None:
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


def test_token_head_keeps_a_whole_zero_in_the_lowest_bits_of_a_float32() -> None:
    x = vectors()
    stored = quantize(x, INT4.value, None)
    assert stored.scale is not None
    assert stored.zero is None
    assert stored.scale.dtype == torch.float32
    matrix = np.ones((1, 1))
    while len(matrix) < 64:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    rotated = (x * signs(64)).double().numpy() @ matrix
    scale = np.maximum((rotated.max(-1) - rotated.min(-1)) / 15, 1e-6)
    zero = np.clip(np.floor(-rotated.min(-1) / scale + 0.5), 0, 15)
    bits = stored.scale[..., 0].numpy().view(np.int32)
    whole = rotated.std(-1) > 1e-3  # otherwise the sums are only rounding errors
    assert (bits & 15)[whole].tolist() == zero[whole].astype(int).tolist()
    np.testing.assert_allclose((bits & -16).view(np.float32)[whole], scale[whole], rtol=2e-5)
    steps = rotated / scale[..., None] + zero[..., None]
    off = np.abs(unpacked(stored).numpy() - np.clip(steps, 0, 15))
    assert off[whole].max() <= 0.5 + 1e-3
    back = dequantize(stored, INT4.value, None).double().numpy()
    expected = ((unpacked(stored).numpy() - zero[..., None]) * scale[..., None]) @ matrix / 64 * signs(64).numpy()
    np.testing.assert_allclose(back[whole], expected[whole], atol=1e-4 * np.abs(x.numpy()).max())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"symmetric": True}, "arithmetic vllm_turboquant requires dtype=int4 granularity=per_token symmetric=false"),
        ({"dtype": "int8"}, "arithmetic vllm_turboquant requires dtype=int4"),
        ({"rotation": "hadamard"}, "rotation=none: set these, or arithmetic=kvgate"),
        ({"arithmetic": "vllm_token_head"}, "arithmetic vllm_token_head requires .* rotation=signed_hadamard"),
        ({"arithmetic": "kvgate", "rotation": "signed_hadamard"}, "rotation must be none or hadamard unless"),
        ({"arithmetic": "kvgate", "dtype": "int3"}, "dtype must be one of .*, got int3"),
        ({"arithmetic": "vllm"}, "arithmetic"),
    ],
)
def test_what_vllm_has_no_such_format_of_is_refused(changed: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Format.model_validate(K8V4.value.model_dump() | changed)


@pytest.mark.parametrize(
    ("backend", "kv", "instead"),
    [
        ("onnxruntime", "vllm_int4", r"kv\.key\.arithmetic=kvgate kv\.key\.rotation=hadamard$"),
        ("tensorrt_rtx", "vllm_int8", r"kv\.key\.arithmetic=kvgate$"),
    ],
)
def test_graphs_refuse_what_the_reference_alone_computes_and_name_it(backend: str, kv: str, instead: str) -> None:
    (job,) = plan([f"backend={backend}", f"kv={kv}"], multirun=False).jobs
    with pytest.raises(UserError, match=rf"^kv\.key\.arithmetic=vllm_\w+: .*; use backend=torch .*, or set {instead}"):
        check_inputs(job)
