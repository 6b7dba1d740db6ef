"""vLLM's own 4-bit formats as its release 0.32.0 defines them, number by number: tests/real_vllm holds them to its code.

turboquant: the values of turboquant_k8v4 (vllm/v1/attention/ops/triton_turboquant_store.py). token_head: int4_per_token_head
(vllm/v1/attention/ops/int4_per_token_head.py). vLLM puts neighbouring channels into a byte, where kvgate puts channels i and
D / 2 + i: the codes are the same, not their places.

Shapes: ..., D head_dim. All arithmetic is float32, as in vLLM on inputs of float32. On a GPU vLLM's divisions are a unit or two
in the last place off, and its int4_per_token_head rounds rotated vectors to the 16 bits of the model.
"""

from functools import cache

import torch
from torch import Tensor

from pipeline.core.formats import SMALLEST_TURBOQUANT_SCALE

LEVELS = 15
SMALLEST_TOKEN_HEAD_SCALE = 1e-6
SEED = 0x9E3779B9
"""Of the signs that vectors are multiplied with before they are rotated."""


def turboquant(x: Tensor, *, towards_zero: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes 0 to 15 (..., D) float32, and scales and minima (..., 1) float16.

    Codes are those of the unrounded scale and minimum, half a step up; `towards_zero` leaves the half out.
    """
    low, high = x.aminmax(dim=-1, keepdim=True)
    scale = ((high - low) / LEVELS).clamp(min=SMALLEST_TURBOQUANT_SCALE)
    codes = ((x - low) / scale + (0.0 if towards_zero else 0.5)).trunc().clamp(0, LEVELS)
    return codes, scale.half(), low.half()


def token_head(x: Tensor, *, towards_zero: bool = False) -> tuple[Tensor, Tensor]:
    """Rotate x (..., D), and return codes 0 to 15 (..., D) float32 and scales (..., 1) float32 with their zeros in them.

    A zero is a whole number of codes, 0 to 15: numbers that all have one sign keep no more than the codes that are left.
    """
    x = _sums(x * signs(x.shape[-1]))
    low, high = x.aminmax(dim=-1, keepdim=True)
    scale = ((high - low) / LEVELS).clamp(min=SMALLEST_TOKEN_HEAD_SCALE)
    zero = _half_away(-low / scale).clamp(0, LEVELS)
    steps = x * (1.0 / scale) + zero
    codes = (steps.trunc() if towards_zero else _half_away(steps)).clamp(0, LEVELS)
    bits = (scale.view(torch.int32) & -16) | zero.int()
    return codes, bits.view(torch.float32)


def token_head_values(codes: Tensor, scale: Tensor) -> Tensor:
    """Return the numbers (..., D) that codes 0 to 15 (..., D) and scales (..., 1) of `token_head` stand for, rotated back."""
    bits = scale.view(torch.int32)
    x = (codes - (bits & 15).float()) * (bits & -16).view(torch.float32)
    return _sums(x) * signs(x.shape[-1]) / _block(x.shape[-1])


@cache
def signs(size: int) -> Tensor:
    """Return the -1 and 1 (size,) that vLLM draws, the same for every layer, head and token; of a block of a head, again and
    again, where head_dim is no power of two."""
    block = _block(size)
    drawn = torch.bernoulli(torch.full((block,), 0.5), generator=torch.Generator().manual_seed(SEED))
    return (2.0 * drawn - 1.0).repeat(size // block)


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
