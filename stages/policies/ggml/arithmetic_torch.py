"""llama.cpp's types in torch, with llama.cpp's exact numbers on x86-64 (ggml/src/ggml-quants.c, ggml-cpu/arch/x86/quants.c).

A block has ggml's layout: byte i of q4_0 holds channel i in its lower four bits and channel 16 + i in its upper four bits.
tests/real_llamacpp compares the bytes with ggml's own code.
"""

import torch
from torch import Tensor

from stages.policies.arithmetic_torch import Arithmetic, Options, Static, Stored, divide, groups_of
from stages.policies.table import GGML_BLOCK, GGML_TYPES

MIDDLE = 8
"""Code of the number 0 in q4_0."""


class GgmlBlocks(Arithmetic):
    """Codes in blocks with a scale per block."""

    def store(self, x: Tensor, static: Static | None, options: Options) -> Stored:  # noqa: ARG002
        blocks = groups_of(x, options.groups)
        if self.spec.bits == 8:
            codes, scale = quantize_8_bits(blocks)
            return Stored(codes.to(torch.int8).flatten(-2), scale.half().squeeze(-1), None)
        scale = divide(blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True)), -MIDDLE)
        inverse = torch.where(scale != 0, 1 / scale, 0.0)
        # The product is not rounded before the addition, because compilers emit a fused multiply-add.
        steps = (blocks.double() * inverse.double() + (MIDDLE + 0.5)).float()
        low, high = steps.trunc().clamp(max=self.spec.levels).to(torch.uint8).chunk(2, dim=-1)
        return Stored((low | high << 4).view(torch.int8).flatten(-2), scale.half().squeeze(-1), None)

    def numbers(self, stored: Stored, static: Static | None, options: Options) -> Tensor:  # noqa: ARG002
        assert stored.scale is not None
        codes = groups_of(stored.codes, stored.scale.shape[-1])
        if self.spec.bits == 4:
            byte = codes.contiguous().view(torch.uint8)
            codes = torch.cat([byte & 15, byte >> 4], dim=-1).to(torch.int8) - MIDDLE
        return (codes.float() * stored.scale.float().unsqueeze(-1)).flatten(-2)


def quantize_8_bits(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes -127 to 127 of blocks x (..., 32), and their scales (..., 1), not yet rounded to float16."""
    largest = x.abs().amax(-1, keepdim=True)
    steps = x * torch.where(largest > 0, 127 / largest, 0.0)
    return steps.round(), divide(largest, 127)


def round_queries(x: Tensor) -> Tensor:
    """Return queries x (..., D) after rounding to 8-bit blocks, as llama.cpp rounds them to multiply with q8_0 or q4_0 keys."""
    codes, scale = quantize_8_bits(groups_of(x, x.shape[-1] // GGML_BLOCK))
    return (codes * scale.half().float()).flatten(-2)


ARITHMETICS = tuple(map(GgmlBlocks, GGML_TYPES))
