"""vLLM's token-and-head formats in torch, with the exact numbers of vLLM 0.32.0 (vllm/v1/attention/ops:
int4_per_token_head.py, and triton_reshape_and_cache_flash.py for INT8 and FP8).

vLLM packs adjacent channels into a byte; kvgate packs channels i and D / 2 + i. On a GPU vLLM rounds rotated vectors to the
model's 16-bit type. tests/real_vllm compares this module with vLLM's code.
"""

from functools import cache

import torch
from torch import Tensor

from stages.policies.arithmetic_torch import Arithmetic, Float, Integer, Options, Scaled, Static, Stored, divide, pack, unpack
from stages.policies.table import TOKEN_HEAD_SMALLEST_SCALE, VLLM_TOKEN_HEAD, VLLM_TOKEN_HEAD_FP8, VLLM_TOKEN_HEAD_INT8

CPU = torch.device("cpu")

SEED = 0x9E3779B9
"""Seed of the random signs that vectors are multiplied by before the rotation."""


class TokenHead(Arithmetic):
    """INT4 codes between the minimum and the maximum of a token and head, including the rotation."""

    def store(self, x: Tensor, static: Static | None, options: Options) -> Stored:  # noqa: ARG002
        codes, scale = encode_token_head(x)
        return Stored(pack(codes - 8, 4), scale, None)

    def numbers(self, stored: Stored, static: Static | None, options: Options) -> Tensor:  # noqa: ARG002
        assert stored.scale is not None
        return decode_token_head(unpack(stored.codes, 4) + 8, stored.scale)


class Absmax(Scaled):
    """Codes with a float32 scale per token and head. Integer codes are rounded half away from zero."""

    def store(self, x: Tensor, static: Static | None, options: Options) -> Stored:  # noqa: ARG002
        scale = divide(x.abs().amax(-1, keepdim=True), self.spec.limit).clamp(min=TOKEN_HEAD_SMALLEST_SCALE)
        steps = x * (1.0 / scale)
        if self.spec.kind == "integer":
            steps = _round_half_away(steps)
        return Stored(self.encode(steps, options), scale, None)


class AbsmaxInteger(Absmax, Integer):
    """INT8."""


class AbsmaxFloat(Absmax, Float):
    """E4M3."""


def encode_token_head(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate x (..., D); return codes 0 to 15 (..., D) float32 and scales (..., 1) float32, which include the zero points.

    A zero point is a whole number of codes from 0 to 15. If all numbers have the same sign, only part of the codes is used.
    """
    levels = VLLM_TOKEN_HEAD.levels
    x = _hadamard(x * random_signs(x.shape[-1], x.device))
    low, high = x.aminmax(dim=-1, keepdim=True)
    scale = divide(high - low, levels).clamp(min=TOKEN_HEAD_SMALLEST_SCALE)
    zero = _round_half_away(-low / scale).clamp(0, levels)
    codes = _round_half_away(x * (1.0 / scale) + zero).clamp(0, levels)
    bits = (scale.view(torch.int32) & -16) | zero.int()
    return codes, bits.view(torch.float32)


def decode_token_head(codes: Tensor, scale: Tensor) -> Tensor:
    """Undo `encode_token_head`: return the numbers (..., D) of codes 0 to 15 (..., D) and scales (..., 1), rotated back."""
    bits = scale.view(torch.int32)
    x = (codes - (bits & 15).float()) * (bits & -16).view(torch.float32)
    return _hadamard(x) * random_signs(x.shape[-1], x.device) / _block(x.shape[-1])


@cache
def random_signs(size: int, device: torch.device = CPU) -> Tensor:
    """Return vLLM's random signs (size,), -1 or 1, which all layers, heads and tokens share.

    If head_dim is not a power of two, the signs of one block repeat for every block of the head.
    """
    block = _block(size)
    drawn = torch.bernoulli(torch.full((block,), 0.5), generator=torch.Generator().manual_seed(SEED))
    return (2.0 * drawn - 1.0).repeat(size // block).to(device)


def _block(size: int) -> int:
    """Return the block size of the rotation: the largest power of two that divides `size`."""
    return size & -size


def _hadamard(x: Tensor) -> Tensor:
    """Multiply x (..., D) by the Hadamard matrix of -1 and 1, in vLLM's order of additions on a CPU: adjacent numbers first."""
    half = 1
    while half < _block(x.shape[-1]):
        first, second = x.reshape(*x.shape[:-1], x.shape[-1] // (2 * half), 2, half).unbind(-2)
        x = torch.stack([first + second, first - second], dim=-2).reshape(x.shape)
        half *= 2
    return x


def _round_half_away(x: Tensor) -> Tensor:
    """Round to the nearest integer, halves away from zero."""
    return torch.where(x >= 0, x + 0.5, x - 0.5).trunc()


ARITHMETICS = (TokenHead(VLLM_TOKEN_HEAD), AbsmaxInteger(VLLM_TOKEN_HEAD_INT8), AbsmaxFloat(VLLM_TOKEN_HEAD_FP8))
