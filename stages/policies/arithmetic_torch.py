"""Common arithmetic of the formats in torch, in float32: scales, zeros, groups, and the packing of integers.

Shapes: H KV heads, T tokens, D head_dim, W storage elements per token, g scales per token.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from stages.policies.spec import MAX_FLOAT16, MIN_SCALE, Spec


@dataclass(frozen=True)
class Static:
    """Static scales of one side of one layer, and the zeros of an asymmetric format."""

    scale: Tensor
    """(1 | H, 1, 1 | D) float32."""
    zero: Tensor | None


@dataclass(frozen=True)
class Stored:
    """Codes in their memory layout, with their stored scales and zeros."""

    codes: Tensor
    """(..., H, T, W) in the storage type."""
    scale: Tensor | None
    """(..., H, T, g) in the type of stored scales; None for static and exact formats."""
    zero: Tensor | None


@dataclass(frozen=True)
class Options:
    """Options of a format in a policy."""

    groups: int
    """Scales per token and head; 0 for static scales."""
    symmetric: bool


class Arithmetic(ABC):
    """Base of the conversions from a format's numbers to codes and back."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec

    @abstractmethod
    def store(self, x: Tensor, static: Static | None, options: Options) -> Stored:
        """Return the stored form of finite numbers x (..., H, T, D)."""

    @abstractmethod
    def numbers(self, stored: Stored, static: Static | None, options: Options) -> Tensor:
        """Return the dequantized numbers, (..., H, T, D) float32."""


class Exact(Arithmetic):
    """Floating-point numbers without a scale."""

    def store(self, x: Tensor, static: Static | None, options: Options) -> Stored:  # noqa: ARG002
        return Stored(x.to(getattr(torch, self.spec.storage.torch)), None, None)

    def numbers(self, stored: Stored, static: Static | None, options: Options) -> Tensor:  # noqa: ARG002
        return stored.codes.float()


class Scaled(Arithmetic):
    """Codes with a scale, which is static or stored as float16."""

    @abstractmethod
    def encode(self, steps: Tensor, options: Options) -> Tensor:
        """Return codes of numbers (..., D) that are scaled and shifted by their zero: nearest, ties to even, saturating."""

    @abstractmethod
    def decode(self, codes: Tensor, options: Options) -> Tensor:
        """Return the unscaled numbers of codes, the inverse of `encode`: (..., D) float32."""

    def store(self, x: Tensor, static: Static | None, options: Options) -> Stored:
        if static is not None:
            return Stored(self.encode((x if static.zero is None else x - static.zero) / static.scale, options), None, None)
        grouped = groups_of(x, options.groups)
        zero = None
        if options.symmetric:
            # The codes are computed from the rounded scale, because decoding uses the rounded scale.
            scale = round_scale(divide(grouped.abs().amax(-1, keepdim=True), self.spec.limit))
        else:
            low, high = grouped.aminmax(dim=-1, keepdim=True)
            zero = round_down_to_half(low)
            scale = round_scale(divide(high - zero.float(), self.spec.levels))
            grouped = grouped - zero.float()
        codes = self.encode((grouped / scale.float()).flatten(-2), options)
        return Stored(codes, scale.squeeze(-1), None if zero is None else zero.squeeze(-1))

    def numbers(self, stored: Stored, static: Static | None, options: Options) -> Tensor:
        codes = self.decode(stored.codes, options)
        if static is not None:
            return dequantize_affine(codes, static.scale, static.zero)
        assert stored.scale is not None
        zero = None if stored.zero is None else stored.zero.float().unsqueeze(-1)
        return dequantize_affine(groups_of(codes, stored.scale.shape[-1]), stored.scale.float().unsqueeze(-1), zero).flatten(-2)


class Float(Scaled):
    """8-bit floating-point numbers."""

    def encode(self, steps: Tensor, options: Options) -> Tensor:  # noqa: ARG002
        # Older torch converts numbers that overflow float8 to NaN.
        return steps.clamp(-self.spec.limit, self.spec.limit).to(getattr(torch, self.spec.storage.torch))

    def decode(self, codes: Tensor, options: Options) -> Tensor:  # noqa: ARG002
        return codes.float()


class Integer(Scaled):
    """Packed integers, symmetric around 0 or from 0 to `levels` with a zero point."""

    def encode(self, steps: Tensor, options: Options) -> Tensor:
        whole = steps.round()
        if options.symmetric:
            return pack(whole.clamp(-self.spec.limit, self.spec.limit), self.spec.bits)
        # Codes 0 to levels are stored as signed numbers.
        return pack(whole.clamp(0, self.spec.levels) - (1 << self.spec.bits - 1), self.spec.bits)

    def decode(self, codes: Tensor, options: Options) -> Tensor:
        signed = unpack(codes, self.spec.bits)
        return signed if options.symmetric else signed + (1 << self.spec.bits - 1)


KINDS: dict[str, type[Arithmetic]] = {"exact": Exact, "float": Float, "integer": Integer}


def groups_of(x: Tensor, groups: int) -> Tensor:
    return x.reshape(*x.shape[:-1], groups, x.shape[-1] // groups)


def divide(x: Tensor, number: float) -> Tensor:
    """Return x / number, rounded once. For a Python number, torch on a GPU multiplies by the rounded reciprocal instead."""
    return x / torch.full((), number, dtype=x.dtype, device=x.device)


@cache
def constant(numbers: tuple[float, ...], device: torch.device) -> Tensor:
    """Return a table of numbers as a cached float32 tensor."""
    return torch.tensor(numbers, dtype=torch.float32, device=device)


def dequantize_affine(codes: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    return codes * scale if zero is None else codes * scale + zero


def round_scale(scale: Tensor) -> Tensor:
    """Round scales to float16 with saturation. A rotation sums channels, so a scale may exceed float16's range."""
    return scale.clamp(MIN_SCALE, MAX_FLOAT16).half()


def round_down_to_half(low: Tensor) -> Tensor:
    """Round `low` down to float16, by at most about two units in the last place, for use as a zero point."""
    zero = low.half()
    below = zero.float() - zero.float().abs() * 2.0**-10 - 2.0**-24
    return torch.where(zero.float() > low, below, zero.float()).clamp(min=-MAX_FLOAT16).half()


def pack(signed: Tensor, bits: int) -> Tensor:
    """Pack integers (..., D) into int8 (..., D * bits / 8).

    The channels are split into 8 / bits equal parts. Part j is stored from bit j * bits upwards. All parts but the last are
    offset by half their range, so that the sign of the byte is the sign of the last part.
    """
    parts = signed.chunk(8 // bits, dim=-1)
    byte = parts[-1] * (1 << 8 - bits)
    for j, part in enumerate(parts[:-1]):
        byte = byte + (part + (1 << bits - 1)) * (1 << bits * j)
    return byte.to(torch.int8)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Undo `pack`; return float32."""
    mask, half = (1 << bits) - 1, 1 << bits - 1
    low = [((packed >> bits * j) & mask) - half for j in range(8 // bits - 1)]
    return torch.cat([*low, packed >> 8 - bits], dim=-1).float()
