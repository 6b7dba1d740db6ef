"""The arithmetic in torch, number by number as vLLM 0.32.0 has it (vllm/v1/attention/ops: int4_per_token_head.py, and
triton_reshape_and_cache_flash.py for INT8 and FP8).

vLLM puts neighbouring channels into a byte, where kvgate puts channels i and D / 2 + i. On a GPU vLLM rounds rotated vectors
to the 16 bits of the model. tests/real_vllm holds this to vLLM's code.
"""

from functools import cache

import torch
from torch import Tensor

from pipeline.formats.oracle import Arithmetic, Float, Integer, Options, Scaled, Static, Stored, divided, pack, unpack
from pipeline.formats.vllm_token_head.spec import SMALLEST_SCALE, VLLM_TOKEN_HEAD, VLLM_TOKEN_HEAD_FP8, VLLM_TOKEN_HEAD_INT8

CPU = torch.device("cpu")

SEED = 0x9E3779B9
"""Of the signs that vectors are multiplied with before they are rotated."""


class TokenHead(Arithmetic):
    """INT4 from minimum to maximum of a rotated token and head. The rotation is part of it."""

    def store(self, x: Tensor, static: Static | None, options: Options) -> Stored:  # noqa: ARG002  (of Arithmetic)
        codes, scale = token_head(x, towards_zero=options.towards_zero)
        return Stored(pack(codes - 8, 4), scale, None)

    def numbers(self, stored: Stored, static: Static | None, options: Options) -> Tensor:  # noqa: ARG002  (of Arithmetic)
        assert stored.scale is not None
        return token_head_values(unpack(stored.codes, 4) + 8, stored.scale)


class Absmax(Scaled):
    """Codes in units of the float32 scale of a token and head; whole ones are rounded half away from zero."""

    def store(self, x: Tensor, static: Static | None, options: Options) -> Stored:  # noqa: ARG002  (of Arithmetic)
        scale = divided(x.abs().amax(-1, keepdim=True), self.spec.limit).clamp(min=SMALLEST_SCALE)
        steps = x * (1.0 / scale)
        if self.spec.kind == "integer" and not options.towards_zero:
            steps = _half_away(steps)
        return Stored(self.encode(steps, options), scale, None)


class AbsmaxInteger(Absmax, Integer):
    """INT8."""


class AbsmaxFloat(Absmax, Float):
    """E4M3, to the nearest code."""


def token_head(x: Tensor, *, towards_zero: bool = False) -> tuple[Tensor, Tensor]:
    """Rotate x (..., D), and return codes 0 to 15 (..., D) float32 and scales (..., 1) float32 with their zeros in them.

    A zero is a whole number of codes, 0 to 15: numbers that all have one sign keep no more than the codes that are left.
    """
    levels = VLLM_TOKEN_HEAD.levels
    x = _sums(x * signs(x.shape[-1], x.device))
    low, high = x.aminmax(dim=-1, keepdim=True)
    scale = divided(high - low, levels).clamp(min=SMALLEST_SCALE)
    zero = _half_away(-low / scale).clamp(0, levels)
    steps = x * (1.0 / scale) + zero
    codes = (steps.trunc() if towards_zero else _half_away(steps)).clamp(0, levels)
    bits = (scale.view(torch.int32) & -16) | zero.int()
    return codes, bits.view(torch.float32)


def token_head_values(codes: Tensor, scale: Tensor) -> Tensor:
    """Return the numbers (..., D) that codes 0 to 15 (..., D) and scales (..., 1) of `token_head` stand for, rotated back."""
    bits = scale.view(torch.int32)
    x = (codes - (bits & 15).float()) * (bits & -16).view(torch.float32)
    return _sums(x) * signs(x.shape[-1], x.device) / _block(x.shape[-1])


@cache
def signs(size: int, device: torch.device = CPU) -> Tensor:
    """Return the -1 and 1 (size,) that vLLM draws, the same for every layer, head and token; of a block of a head, again and
    again, where head_dim is no power of two."""
    block = _block(size)
    drawn = torch.bernoulli(torch.full((block,), 0.5), generator=torch.Generator().manual_seed(SEED))
    return (2.0 * drawn - 1.0).repeat(size // block).to(device)


def _block(size: int) -> int:
    """The largest power of two that divides `size`: each block of as many channels is rotated by itself."""
    return size & -size


def _sums(x: Tensor) -> Tensor:
    """x (..., D) times the Hadamard matrix of -1 and 1, in the order in which vLLM adds on a CPU: neighbours first."""
    half = 1
    while half < _block(x.shape[-1]):
        first, second = x.reshape(*x.shape[:-1], -1, 2, half).unbind(-2)
        x = torch.stack([first + second, first - second], dim=-2).reshape(x.shape)
        half *= 2
    return x


def _half_away(x: Tensor) -> Tensor:
    """The nearest whole number, halves away from zero."""
    return torch.where(x >= 0, x + 0.5, x - 0.5).trunc()


ORACLES = (TokenHead(VLLM_TOKEN_HEAD), AbsmaxInteger(VLLM_TOKEN_HEAD_INT8), AbsmaxFloat(VLLM_TOKEN_HEAD_FP8))
