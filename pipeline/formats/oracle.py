"""What the formats' arithmetics in torch share: scales, zeros, groups, and the packing of integers. All of it is float32.

Shapes: H KV heads, T tokens, D head_dim, W storage elements of a token, g scales of a token.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from pipeline.formats.spec import MAX_FLOAT16, MIN_SCALE, Spec


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
    """(..., H, T, g) in the type of stored scales; None for static and exact formats."""
    zero: Tensor | None

    @property
    def tensors(self) -> list[Tensor]:
        """Those of the three that there are."""
        return [tensor for tensor in (self.codes, self.scale, self.zero) if tensor is not None]


def each(function: Callable[[list[Tensor]], Tensor], stored: Sequence[Stored]) -> Stored:
    """Return `function` of the codes, of the scales and of the zeros of `stored`, which are of one format."""
    parts = [function(list(tensors)) for tensors in zip(*(one.tensors for one in stored), strict=True)]
    return Stored(*parts, *[None] * (3 - len(parts)))


def concatenated(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate codes or scales (H, T, ...) of consecutive tokens. 8-bit floats go as bytes."""
    dtype = parts[0].dtype
    raw = [part.view(torch.uint8) for part in parts] if dtype.itemsize == 1 else list(parts)
    return torch.cat(raw, dim=1).view(dtype)


@dataclass(frozen=True)
class Options:
    """What a policy says of a format."""

    groups: int
    """Scales of one token of one head; 0 where they are static."""
    symmetric: bool
    towards_zero: bool = False
    """Codes are the nearest that are not larger, as a cast that truncates makes them, instead of the nearest."""


class Arithmetic(ABC):
    """A format's numbers to codes and back."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec

    @abstractmethod
    def store(self, x: Tensor, static: Static | None, options: Options) -> Stored:
        """Return finite x (..., H, T, D) as it is stored."""

    @abstractmethod
    def numbers(self, stored: Stored, static: Static | None, options: Options) -> Tensor:
        """Return the numbers that the codes stand for, (..., H, T, D) float32."""


class Exact(Arithmetic):
    """Floating-point numbers that are not scaled."""

    def store(self, x: Tensor, static: Static | None, options: Options) -> Stored:  # noqa: ARG002  (none)
        return Stored(x.to(getattr(torch, self.spec.storage.torch)), None, None)

    def numbers(self, stored: Stored, static: Static | None, options: Options) -> Tensor:  # noqa: ARG002  (none)
        return stored.codes.float()


class Scaled(Arithmetic):
    """Codes in units of a scale, static or stored as a float16."""

    @abstractmethod
    def encode(self, steps: Tensor, options: Options) -> Tensor:
        """Return numbers (..., D) in units of their scale, from their zero, as codes: the nearest, ties to even, saturating."""

    @abstractmethod
    def decode(self, codes: Tensor, options: Options) -> Tensor:
        """Return the numbers that `encode` made codes of, (..., D) float32."""

    def store(self, x: Tensor, static: Static | None, options: Options) -> Stored:
        if static is not None:
            return Stored(self.encode((x if static.zero is None else x - static.zero) / static.scale, options), None, None)
        grouped = groups_of(x, options.groups)
        zero = None
        if options.symmetric:
            # The codes belong to the rounded scale, which is read back, not to the exact one.
            scale = stored_scale(divided(grouped.abs().amax(-1, keepdim=True), self.spec.limit))
        else:
            low, high = grouped.aminmax(dim=-1, keepdim=True)
            zero = half_below(low)
            scale = stored_scale(divided(high - zero.float(), self.spec.levels))
            grouped = grouped - zero.float()
        codes = self.encode((grouped / scale.float()).flatten(-2), options)
        return Stored(codes, scale.squeeze(-1), None if zero is None else zero.squeeze(-1))

    def numbers(self, stored: Stored, static: Static | None, options: Options) -> Tensor:
        codes = self.decode(stored.codes, options)
        if static is not None:
            return affine(codes, static.scale, static.zero)
        assert stored.scale is not None
        zero = None if stored.zero is None else stored.zero.float().unsqueeze(-1)
        return affine(groups_of(codes, stored.scale.shape[-1]), stored.scale.float().unsqueeze(-1), zero).flatten(-2)


class Float(Scaled):
    """Floating-point numbers of a byte."""

    def encode(self, steps: Tensor, options: Options) -> Tensor:
        # Older torch turns what overflows float8 into NaN.
        codes = steps.clamp(-self.spec.limit, self.spec.limit).to(getattr(torch, self.spec.storage.torch))
        if options.towards_zero:  # the next smaller magnitude is the next smaller byte, of either sign
            codes = (codes.view(torch.uint8) - (codes.float().abs() > steps.abs()).to(torch.uint8)).view(codes.dtype)
        return codes

    def decode(self, codes: Tensor, options: Options) -> Tensor:  # noqa: ARG002  (of Scaled)
        return codes.float()


class Integer(Scaled):
    """Whole numbers, packed: symmetric around 0, or 0 to `levels` from a zero."""

    def encode(self, steps: Tensor, options: Options) -> Tensor:
        whole = steps.trunc() if options.towards_zero else steps.round()
        if options.symmetric:
            return pack(whole.clamp(-self.spec.limit, self.spec.limit), self.spec.bits)
        # Codes 0 to levels are stored as signed numbers.
        return pack(whole.clamp(0, self.spec.levels) - (1 << self.spec.bits - 1), self.spec.bits)

    def decode(self, codes: Tensor, options: Options) -> Tensor:
        signed = unpack(codes, self.spec.bits)
        return signed if options.symmetric else signed + (1 << self.spec.bits - 1)


KINDS: dict[str, type[Arithmetic]] = {"exact": Exact, "float": Float, "integer": Integer}


def groups_of(x: Tensor, groups: int) -> Tensor:
    """(..., D) -> (..., groups, D / groups)."""
    return x.reshape(*x.shape[:-1], groups, x.shape[-1] // groups)


def divided(x: Tensor, number: float) -> Tensor:
    """Return x / number, rounded once on every device: on a GPU torch multiplies by the reciprocal of a Python number."""
    return x / torch.full((), number, dtype=x.dtype, device=x.device)


@cache
def constant(numbers: tuple[float, ...], device: torch.device) -> Tensor:
    """Return the numbers of a table as float32."""
    return torch.tensor(numbers, dtype=torch.float32, device=device)


def affine(codes: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    """Return codes * scale + zero."""
    return codes * scale if zero is None else codes * scale + zero


def stored_scale(scale: Tensor) -> Tensor:
    """Round scales to float16, saturating: a rotation sums channels, so that a scale may exceed float16's range."""
    return scale.clamp(MIN_SCALE, MAX_FLOAT16).half()


def half_below(low: Tensor) -> Tensor:
    """Round `low` down to a float16, the zero of its codes; it is at most about two units in the last place below."""
    zero = low.half()
    below = zero.float() - zero.float().abs() * 2.0**-10 - 2.0**-24
    return torch.where(zero.float() > low, below, zero.float()).clamp(min=-MAX_FLOAT16).half()


def pack(signed: Tensor, bits: int) -> Tensor:
    """Whole numbers (..., D) -> int8 (..., D * bits / 8).

    Part j of the 8 / bits equal parts of the channels sits in bits j * bits and up; all but the top part are offset by
    half their range, so that the byte's own sign is the top part's.
    """
    parts = signed.chunk(8 // bits, dim=-1)
    byte = parts[-1] * (1 << 8 - bits)
    for j, part in enumerate(parts[:-1]):
        byte = byte + (part + (1 << bits - 1)) * (1 << bits * j)
    return byte.to(torch.int8)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """The inverse of `pack`, as float32."""
    mask, half = (1 << bits) - 1, 1 << bits - 1
    low = [((packed >> bits * j) & mask) - half for j in range(8 // bits - 1)]
    return torch.cat([*low, packed >> 8 - bits], dim=-1).float()
