"""Quantization and dequantization in plain torch: a rotation, and the formats' arithmetic in stages/policies.

Shapes: H KV heads, T tokens, D head_dim. All arithmetic is float32.
"""

import math
from functools import cache

import torch
from torch import Tensor

from stages.policies.arithmetic_torch import KINDS, Arithmetic, Options, Static, Stored, groups_of
from stages.policies.formats import Format
from stages.policies.ggml.arithmetic_torch import ARITHMETICS as GGML
from stages.policies.nvfp4.arithmetic_torch import ARITHMETIC as NVFP4
from stages.policies.scales import SideScales
from stages.policies.spec import Spec
from stages.policies.vllm_token_head.arithmetic_torch import ARITHMETICS as VLLM_TOKEN_HEADS
from stages.policies.vllm_turboquant.arithmetic_torch import ARITHMETIC as VLLM_TURBOQUANT

CPU = torch.device("cpu")

SPECIAL_FORMATS: dict[str, Arithmetic] = {
    entry.spec.name: entry for entry in (NVFP4, VLLM_TURBOQUANT, *VLLM_TOKEN_HEADS, *GGML)
}
"""Format name -> arithmetic, for formats that do not use the common arithmetic of their kind."""


def arithmetic(code: Spec) -> Arithmetic:
    return SPECIAL_FORMATS.get(code.name) or KINDS[code.kind](code)


def static_scales(side: SideScales, form: Format, kv_heads: int, head_dim: int, device: torch.device = CPU) -> Static:
    """Return static scales in a shape that broadcasts against (..., H, T, D)."""
    heads = 1 if form.static_scales(kv_heads, head_dim) == 1 else kv_heads
    channels = head_dim if form.granularity == "per_channel" else 1

    def shaped(values: tuple[float, ...]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device).view(heads, 1, channels)

    return Static(shaped(side.scale), None if side.zero is None else shaped(side.zero))


def quantize(x: Tensor, form: Format, static: Static | None) -> Stored:
    """Quantize finite x (..., H, T, D). `static` is None unless the format has static scales."""
    return arithmetic(form.code).store(rotate(x.float(), form), static, _options(form, x.shape[-1]))


def dequantize(stored: Stored, form: Format, static: Static | None) -> Tensor:
    """Return the dequantized numbers (..., H, T, D) float32, rotated back if the format rotates."""
    head_dim = 8 * stored.codes.shape[-1] * form.code.storage.bytes // form.code.bits
    return rotate(arithmetic(form.code).numbers(stored, static, _options(form, head_dim)), form)


def _options(form: Format, head_dim: int) -> Options:
    return Options(form.scales_per_token(head_dim), form.symmetric)


def rotate(x: Tensor, form: Format) -> Tensor:
    """Rotate x (..., D) as before quantization, or back: the rotation is its own inverse."""
    if form.rotation == "hadamard_64":
        return (groups_of(x, x.shape[-1] // 64) @ hadamard(64, x.device)).flatten(-2)
    return x @ hadamard(x.shape[-1], x.device) if form.rotation == "hadamard" else x


@cache
def hadamard(size: int, device: torch.device = CPU) -> Tensor:
    """Return Sylvester's Hadamard matrix divided by sqrt(size), (size, size) float32: symmetric and its own inverse."""
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)], 0)
    return (matrix / math.sqrt(size)).to(device)
