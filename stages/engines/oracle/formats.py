"""The arithmetic of pipeline.core.formats in plain torch: numbers to codes and back.

Shapes: H KV heads, T tokens, D head_dim, W storage elements of a token, g scales of a token. All arithmetic is float32.
"""

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from pipeline.core.formats import LARGEST_NVFP4_SCALE, MAX_FLOAT16, MIN_SCALE, SMALLEST_NVFP4_SCALE, Format
from pipeline.core.scales import SideScales
from stages.engines.oracle import vllm_formats

TYPES = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
"""Storage of codes that are floating-point numbers of a byte or more; what is smaller is packed into int8."""

E2M1 = torch.tensor((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))
"""Magnitudes of NVFP4's codes by their lower three bits; the fourth one is the sign."""


@dataclass(frozen=True)
class Static:
    """Scales of one side of one layer that are fixed at build time, and the zeros of an asymmetric format."""

    scale: Tensor
    """(1 | H, 1, 1 | D) float32."""
    zero: Tensor | None


@dataclass(frozen=True)
class Stored:
    """Codes as they lie in memory, and the scales and zeros that lie beside them."""

    codes: Tensor
    """(..., H, T, W) in the storage type."""
    scale: Tensor | None
    """(..., H, T, g) float16, of NVFP4 float8_e4m3fn, of vllm_token_head float32; None for static and exact formats."""
    zero: Tensor | None


def static_scales(side: SideScales, form: Format, kv_heads: int, head_dim: int) -> Static:
    """Return the scales of KVScales in a shape that broadcasts against (..., H, T, D)."""
    heads = 1 if form.static_scales(kv_heads, head_dim) == 1 else kv_heads
    channels = head_dim if form.granularity == "per_channel" else 1

    def shaped(values: tuple[float, ...]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32).view(heads, 1, channels)

    return Static(shaped(side.scale), None if side.zero is None else shaped(side.zero))


def quantize(x: Tensor, form: Format, static: Static | None, *, towards_zero: bool = False) -> Stored:
    """Return finite x (..., H, T, D) as it is stored. `static` is None exactly when the format has no static scales.

    Codes are the nearest ones; with `towards_zero` the nearest that are not larger, as a cast that truncates makes them.
    """
    x = x.float()
    if form.exact:
        return Stored(x.to(TYPES[form.dtype]), None, None)
    if form.arithmetic == "vllm_turboquant":
        codes, scale, low = vllm_formats.turboquant(x, towards_zero=towards_zero)
        return Stored(_pack(codes - 8, 4), scale, low)
    if form.arithmetic == "vllm_token_head":
        codes, scale = vllm_formats.token_head(x, towards_zero=towards_zero)
        return Stored(_pack(codes - 8, 4), scale, None)
    if form.rotation == "hadamard":
        x = x @ hadamard(x.shape[-1])
    if form.in_blocks:
        assert static is not None, "NVFP4 has a scale of the layer"
        return _in_blocks(x, form, static.scale, towards_zero=towards_zero)
    if static is not None:
        return Stored(_encode(x, static.scale, static.zero, form, towards_zero=towards_zero), None, None)
    grouped = _grouped(x, form.scales_per_token(x.shape[-1]))
    if form.symmetric:
        zero = None
        # The codes belong to the rounded scale, which is read back, not to the exact one.
        scale = _stored_scale(grouped.abs().amax(-1, keepdim=True) / form.code.limit)
    else:
        low, high = grouped.aminmax(dim=-1, keepdim=True)
        zero = _half_below(low)
        scale = _stored_scale((high - zero.float()) / form.code.levels)
    codes = _encode(
        grouped, scale.float(), None if zero is None else zero.float(), form, flatten=True, towards_zero=towards_zero
    )
    return Stored(codes, scale.squeeze(-1), None if zero is None else zero.squeeze(-1))


def dequantize(stored: Stored, form: Format, static: Static | None) -> Tensor:
    """Return the numbers that the codes stand for, (..., H, T, D) float32, rotated back where the format rotates."""
    if form.exact:
        return stored.codes.float()
    if form.in_blocks:
        assert static is not None, "NVFP4 has a scale of the layer"
        assert stored.scale is not None, "and one of each block"
        scale = stored.scale.float() * static.scale
        x = (_grouped(_unpack_e2m1(stored.codes), scale.shape[-1]) * scale.unsqueeze(-1)).flatten(-2)
        return x @ hadamard(x.shape[-1]) if form.rotation == "hadamard" else x
    codes = _unpack(stored.codes, form.code.bits) if form.code.kind == "integer" else stored.codes.float()
    if not form.symmetric:
        codes = codes + (1 << form.code.bits - 1)
    if form.arithmetic == "vllm_token_head":
        assert stored.scale is not None
        return vllm_formats.token_head_values(codes, stored.scale)
    if static is not None:
        x = _affine(codes, static.scale, static.zero)
    else:
        assert stored.scale is not None
        grouped = _grouped(codes, stored.scale.shape[-1])
        zero = None if stored.zero is None else stored.zero.float().unsqueeze(-1)
        x = _affine(grouped, stored.scale.float().unsqueeze(-1), zero).flatten(-2)
    return x @ hadamard(x.shape[-1]) if form.rotation == "hadamard" else x


def _in_blocks(x: Tensor, form: Format, layer_scale: Tensor, *, towards_zero: bool) -> Stored:
    """Store x (..., H, T, D) as NVFP4."""
    blocks = _grouped(x, form.scales_per_token(x.shape[-1]))
    amax = blocks.abs().amax(-1)

    def rounded(largest_code: float) -> tuple[Tensor, Tensor, Tensor]:
        """Scales that make the largest magnitude this code, the codes, and each block's squared error."""
        scale = (amax / (largest_code * layer_scale)).clamp(SMALLEST_NVFP4_SCALE, LARGEST_NVFP4_SCALE).to(torch.float8_e4m3fn)
        step = (scale.float() * layer_scale).unsqueeze(-1)
        codes = _e2m1(blocks / step, towards_zero=towards_zero)
        return scale, codes, (_e2m1_values(codes) * step - blocks).square().sum(-1)

    scale, codes, error = rounded(6.0)
    if form.block_scale == "4over6":
        other_scale, other_codes, other_error = rounded(4.0)
        better = other_error < error
        codes = torch.where(better.unsqueeze(-1), other_codes, codes)
        scale = torch.where(better, other_scale.float(), scale.float()).to(torch.float8_e4m3fn)
    low, high = codes.flatten(-2).chunk(2, dim=-1)
    return Stored((low + 16 * high).to(torch.uint8).view(torch.int8), scale, None)


def _e2m1(steps: Tensor, *, towards_zero: bool) -> Tensor:
    """Codes 0 to 15 of numbers in units of their scale: the nearest, ties to even codes, saturating."""
    magnitude = steps.abs().clamp(max=6.0)
    unit = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    whole = magnitude / unit
    # Codes 0 to 4 are halves, 4 to 6 ones above 2, and 6 and 7 twos above 4.
    return (whole.trunc() if towards_zero else whole.round()) + 2 * (unit.log2() + 1) + 8 * (steps < 0)


def _e2m1_values(codes: Tensor) -> Tensor:
    magnitude = E2M1[(codes % 8).long()]
    return torch.where(codes >= 8, -magnitude, magnitude)


def _unpack_e2m1(packed: Tensor) -> Tensor:
    """Packed codes (..., D / 2) -> numbers (..., D): the lower four bits of the bytes are the first half of the channels."""
    byte = packed.view(torch.uint8)
    return _e2m1_values(torch.cat([byte & 15, byte >> 4], dim=-1))


def _grouped(x: Tensor, groups: int) -> Tensor:
    """(..., D) -> (..., groups, D / groups)."""
    return x.reshape(*x.shape[:-1], groups, x.shape[-1] // groups)


def _affine(codes: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    return codes * scale if zero is None else codes * scale + zero


def _stored_scale(scale: Tensor) -> Tensor:
    """Round scales to float16, saturating: a rotation sums channels, so that a scale may exceed float16's range."""
    return scale.clamp(MIN_SCALE, MAX_FLOAT16).half()


def _half_below(low: Tensor) -> Tensor:
    """Round `low` down to a float16, the zero of its codes; it is at most about two units in the last place below."""
    zero = low.half()
    below = zero.float() - zero.float().abs() * 2.0**-10 - 2.0**-24
    return torch.where(zero.float() > low, below, zero.float()).clamp(min=-MAX_FLOAT16).half()


def _encode(
    x: Tensor, scale: Tensor, zero: Tensor | None, form: Format, *, flatten: bool = False, towards_zero: bool = False
) -> Tensor:
    """Nearest codes, ties to even, saturating; `flatten` turns (..., g, D / g) into (..., D) first."""
    code = form.code
    steps = (x if zero is None else x - zero) / scale
    if flatten:
        steps = steps.flatten(-2)
    if code.kind == "float":
        # Older torch turns what overflows float8 into NaN.
        codes = steps.clamp(-code.limit, code.limit).to(TYPES[form.dtype])
        if towards_zero:  # the next smaller magnitude is the next smaller byte, of either sign
            codes = (codes.view(torch.uint8) - (codes.float().abs() > steps.abs()).to(torch.uint8)).view(codes.dtype)
        return codes
    whole = steps.trunc() if towards_zero else steps.round()
    if form.symmetric:
        return _pack(whole.clamp(-code.limit, code.limit), code.bits)
    # Codes 0 to levels are stored as signed numbers.
    return _pack(whole.clamp(0, code.levels) - (1 << code.bits - 1), code.bits)


def _pack(signed: Tensor, bits: int) -> Tensor:
    """Whole numbers (..., D) -> int8 (..., D * bits / 8).

    Part j of the 8 / bits equal parts of the channels sits in bits j * bits and up; all but the top part are offset by
    half their range, so that the byte's own sign is the top part's.
    """
    parts = signed.chunk(8 // bits, dim=-1)
    byte = parts[-1] * (1 << 8 - bits)
    for j, part in enumerate(parts[:-1]):
        byte = byte + (part + (1 << bits - 1)) * (1 << bits * j)
    return byte.to(torch.int8)


def _unpack(packed: Tensor, bits: int) -> Tensor:
    """The inverse of `_pack`, as float32."""
    mask, half = (1 << bits) - 1, 1 << bits - 1
    low = [((packed >> bits * j) & mask) - half for j in range(8 // bits - 1)]
    return torch.cat([*low, packed >> 8 - bits], dim=-1).float()


@cache
def hadamard(size: int) -> Tensor:
    """Return Sylvester's Hadamard matrix over sqrt(size), (size, size) float32: symmetric, and its own inverse."""
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)], 0)
    return matrix / math.sqrt(size)
