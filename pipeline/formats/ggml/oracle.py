"""The arithmetic in torch, number by number as llama.cpp has it on x86-64 (ggml/src/ggml-quants.c, ggml-cpu/arch/x86/quants.c).

A block's codes lie as ggml has them: byte i holds channel i in its lower four bits and channel 16 + i in its upper ones; those
of q5_1 come after four bytes of their fifth bits. tests/real_llamacpp holds this to ggml's own code, byte by byte.
"""

import torch
from torch import Tensor

from pipeline.formats.ggml.spec import BLOCK, IQ4_NL, TYPES
from pipeline.formats.oracle import Arithmetic, Options, Static, Stored, constant, divided, groups_of
from pipeline.formats.spec import Spec


class Blocks(Arithmetic):
    """Codes in units of their block's scale, from 0 or from the block's minimum."""

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        self.middle = 1 << spec.bits - 1 if spec.bits < 8 and spec.only == (BLOCK, True) else 0
        """The code of 0."""

    def store(self, x: Tensor, static: Static | None, options: Options) -> Stored:  # noqa: ARG002  (of Arithmetic)
        codes, scale, zero = self.codes(groups_of(x, options.groups), 0.0 if options.towards_zero else 0.5)
        return Stored(
            self._packed(codes).flatten(-2), scale.half().squeeze(-1), None if zero is None else zero.half().squeeze(-1)
        )

    def numbers(self, stored: Stored, static: Static | None, options: Options) -> Tensor:  # noqa: ARG002  (of Arithmetic)
        assert stored.scale is not None
        codes = self._unpacked(groups_of(stored.codes, stored.scale.shape[-1])) * stored.scale.float().unsqueeze(-1)
        return (codes if stored.zero is None else codes + stored.zero.float().unsqueeze(-1)).flatten(-2)

    def codes(self, x: Tensor, half: float) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the codes of blocks x (..., 32), their scales and their minima (..., 1), as float32."""
        if self.spec.bits == 8:
            codes, scale = eight_bits(x, half)
            return codes, scale, None
        if self.middle:
            scale = divided(x.gather(-1, x.abs().argmax(-1, keepdim=True)), -self.middle)
            steps, zero = x, None
        else:
            zero, high = x.aminmax(dim=-1, keepdim=True)
            scale = divided(high - zero, self.spec.levels)
            steps = x - zero
        # The product is not rounded before the sum: compilers make one instruction of both.
        added = (steps.double() * _inverse(scale).double() + (self.middle + half)).float()
        return added.trunc().clamp(max=self.spec.levels), scale, zero

    def _packed(self, codes: Tensor) -> Tensor:
        """Codes (..., 32) of blocks -> their bytes (..., 4 * bits)."""
        if self.spec.bits == 8:
            return codes.to(torch.int8)
        whole = codes.to(torch.int64)
        low, high = (whole & 15).chunk(2, dim=-1)
        parts = [low | high << 4]
        if self.spec.bits == 5:
            parts.insert(0, (groups_of(whole >> 4, 4) * _bits(whole)).sum(-1))
        return torch.cat(parts, dim=-1).to(torch.uint8).view(torch.int8)

    def _unpacked(self, packed: Tensor) -> Tensor:
        """The inverse of `_packed`, less the code of 0, as float32."""
        if self.spec.bits == 8:
            return packed.float()
        byte = packed.contiguous().view(torch.uint8).to(torch.int64)
        nibbles = byte[..., -BLOCK // 2 :]
        codes = torch.cat([nibbles & 15, nibbles >> 4], dim=-1)
        if self.spec.bits == 5:
            codes = codes + 16 * ((byte[..., :4, None] & _bits(byte)) > 0).flatten(-2)
        return (codes - self.middle).float()


class Table(Blocks):
    """Codes that stand for the numbers of a table, and the scale that fits them best where large numbers count more."""

    def codes(self, x: Tensor, half: float) -> tuple[Tensor, Tensor, Tensor | None]:  # noqa: ARG002  (they are not rounded)
        table = constant(IQ4_NL, x.device)
        first = x.gather(-1, x.abs().argmax(-1, keepdim=True)) / table[0]
        steps = x * _inverse(first)
        upper = torch.searchsorted(table, steps.contiguous(), right=True).clamp(1, len(table) - 1)
        codes = torch.where(steps - table[upper - 1] < table[upper] - steps, upper - 1, upper)
        values = table[codes]
        up = down = torch.zeros_like(x[..., 0])
        for weighted, number, value in zip((x * x * values).unbind(-1), x.unbind(-1), values.unbind(-1), strict=True):
            up, down = up + weighted * number, down + weighted * value
        scale = torch.where(down > 0, (up / down).nan_to_num(), 0.0)
        return torch.where(x.abs().amax(-1, keepdim=True) < 1e-15, 0, codes), scale.unsqueeze(-1), None

    def _unpacked(self, packed: Tensor) -> Tensor:
        return constant(IQ4_NL, packed.device)[(super()._unpacked(packed) + self.middle).long()]


def eight_bits(x: Tensor, half: float = 0.5) -> tuple[Tensor, Tensor]:
    """Return codes -127 to 127 of blocks x (..., 32), and their scales (..., 1) before they are rounded to float16."""
    largest = x.abs().amax(-1, keepdim=True)
    steps = x * torch.where(largest > 0, 127 / largest, 0.0)
    return (steps.round() if half else steps.trunc()), divided(largest, 127)


def asked(x: Tensor) -> Tensor:
    """Return queries x (..., D) as their product with keys of any of the types takes them: in blocks of 8 bits."""
    codes, scale = eight_bits(groups_of(x, x.shape[-1] // BLOCK))
    return (codes * scale.half().float()).flatten(-2)


def _bits(like: Tensor) -> Tensor:
    return 1 << torch.arange(8, device=like.device)


def _inverse(scale: Tensor) -> Tensor:
    return torch.where(scale != 0, 1 / scale, 0.0)


ORACLES = tuple((Table if spec.name == "iq4_nl" else Blocks)(spec) for spec in TYPES)
