"""Every number format of KV policies, tensors to store, and round trips of the tensors through the formats.

Legend: H = KV heads, T = tokens, D = head_dim.
"""

from dataclasses import dataclass, replace
from itertools import product
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from stages.engines.reference.formats import dequantize, hadamard, quantize, rotate, static_scales
from stages.policies.arithmetic_torch import Static, Stored
from stages.policies.formats import Format, Granularity, Rotation, ScaleSource
from stages.policies.scales import SideScales
from stages.policies.spec import GROUP_SIZES
from stages.policies.table import CODES
from stages.quantize.scales import Extremes, scales_from_extremes

LARGEST = 65504 / 128**0.5
"""Largest magnitude that every format can store.

A rotation may concentrate a head of 128 channels in one channel, and the caches refuse values beyond float16.
"""


def add_int2(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add 2-bit integers to the table of codes. A new integer width needs only a table entry."""
    monkeypatch.setitem(CODES, "int2", replace(CODES["int4"], name="int2", bits=2, limit=1.0, native=(None, None)))


def every_format() -> list[Format]:
    """Return all formats of kvgate's own arithmetic that Format accepts, except llama.cpp's types."""
    formats = []
    rotations, sources = get_args(Rotation), get_args(ScaleSource)
    keys = ("dtype", "granularity", "group_size", "symmetric", "scale", "rotation")
    plain = [name for name, code in CODES.items() if code.dynamic_group is None]  # the others have tests of their own
    for values in product(plain, get_args(Granularity), (None, *GROUP_SIZES), (True, False), sources, rotations):
        try:
            formats.append(Format.model_validate(dict(zip(keys, values, strict=True))))
        except ValidationError:
            continue
    return formats


FORMATS = every_format()
QUANTIZED = [form for form in FORMATS if not form.exact]
DYNAMIC = [form for form in QUANTIZED if not form.has_static_scales]


def fitting(formats: list[Format], head_dim: int) -> list[Format]:
    """Return the formats that support this head size."""
    return [form for form in formats if form.refuse_head_dim(head_dim) is None]


def name(form: Format) -> str:
    """Return a unique name of the format."""
    scales = (form.granularity, form.group_size, "" if form.symmetric else "asymmetric", form.scale)
    parts = (form.dtype, *scales, form.rotation)
    return " ".join(str(part) for part in parts if part not in (None, "", "none"))


@dataclass(frozen=True)
class Trial:
    """A tensor and its round trip through a format. Both are rotated if the format rotates, as its codes are."""

    form: Format
    stored: Stored
    x_HTD: Tensor
    back_HTD: Tensor
    step_HTD: Tensor
    """Scale of every number."""
    zero_HTD: Tensor
    """Zero point of every number."""


def fixed(x_HTD: Tensor, form: Format) -> Static | None:
    """Return static scales under which no number of x_HTD saturates, or scales of 1 if the format is uncalibrated."""
    if not form.has_static_scales:
        return None
    heads, _, dim = x_HTD.shape
    count = form.static_scales(heads, dim)
    turned_HTD = rotate(x_HTD, form)
    extremes = (turned_HTD.amin(1), turned_HTD.amax(1))
    if form.scale == "uncalibrated":
        return static_scales(SideScales(scale=(1.0,) * count), form, heads, dim)
    scale = scales_from_extremes(form, count, Extremes(*(tuple(extreme.flatten().tolist()) for extreme in extremes)))
    return static_scales(scale, form, heads, dim)


def tried(x_HTD: Tensor, form: Format) -> Trial:
    """Store a tensor in a format and read it back."""
    static = fixed(x_HTD, form)
    stored = quantize(x_HTD, form, static)
    back = dequantize(stored, form, static)
    if form.rotation == "hadamard":
        x_HTD, back = x_HTD @ hadamard(x_HTD.shape[-1]), back @ hadamard(x_HTD.shape[-1])
    if form.static:
        assert static is not None
        step, zero = static.scale, static.zero
    else:
        repeats = x_HTD.shape[-1] // max(1, form.scales_per_token(x_HTD.shape[-1]))
        scales, zero = (None if s is None else s.float().repeat_interleave(repeats, -1) for s in (stored.scale, stored.zero))
        step = (torch.ones(1) if scales is None else scales) * (1.0 if static is None else static.scale)
    zeros_HTD = torch.zeros_like(x_HTD)
    return Trial(form, stored, x_HTD, back, step + zeros_HTD, zeros_HTD if zero is None else zero + zeros_HTD)


@st.composite
def tensors(draw: st.DrawFn, largest: float = 5e3) -> Tensor:
    """Draw a float32 tensor (H, T, D).

    It is noise around small and large offsets, with a constant token and a few numbers that hypothesis chooses.
    """
    shape = draw(st.tuples(st.integers(1, 2), st.integers(1, 3), st.sampled_from((16, 64, 128))))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    size = 2.0 ** draw(st.integers(-20, 8))
    offsets = rng.choice((0.0, 0.5, 3.0, -40.0, 1000.0, -1000.0), size=(*shape[:2], 1))
    x = (rng.standard_normal(shape) + offsets) * size
    if draw(st.booleans()):
        x[:, 0] = x[:, 0, :1]
    numbers = st.floats(-largest, largest, width=32, allow_subnormal=True)
    for index, number in draw(st.lists(st.tuples(st.integers(0, x.size - 1), numbers), max_size=3)):
        x.flat[index] = number
    return torch.from_numpy(np.clip(x, -LARGEST, LARGEST).astype(np.float32))
