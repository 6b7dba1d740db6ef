"""The arithmetic in torch, number by number as vLLM 0.32.0 has it (vllm/v1/attention/ops/triton_turboquant_store.py).

vLLM puts neighbouring channels into a byte, where kvgate puts channels i and D / 2 + i: the 4-bit codes are the same, not
their places. On a GPU vLLM's divisions are a unit or two in the last place off. tests/real_vllm holds this to vLLM's code.
"""

import math
from functools import cache

import torch
from torch import Tensor

from pipeline.formats.oracle import Arithmetic, Integer, Options, Static, Stored, divided, pack, unpack
from pipeline.formats.vllm_turboquant.spec import SMALLEST_SCALE, TYPES

CPU = torch.device("cpu")


class Turboquant(Integer):
    """Codes from minimum to maximum of a token and head, of the unrounded scale and minimum, half a step up."""

    def store(self, x: Tensor, static: Static | None, options: Options) -> Stored:  # noqa: ARG002  (of Arithmetic)
        low, high = x.aminmax(dim=-1, keepdim=True)
        scale = divided(high - low, self.spec.levels).clamp(min=SMALLEST_SCALE)
        steps = (x - low) / scale + (0.0 if options.towards_zero else 0.5)
        return Stored(self.encode(steps.trunc(), options), scale.half(), low.half())


class Centroids(Arithmetic):
    """The nearest centroid to each number of a rotated vector of length 1, and the vector's length.

    Centroids of a vector are of length 1 together again when they are read.
    """

    def store(self, x: Tensor, static: Static | None, options: Options) -> Stored:  # noqa: ARG002  (of Arithmetic)
        points, length = centroids(x.shape[-1], self.spec.bits, x.device), x.norm(dim=-1, keepdim=True)
        unit = x / (length + 1e-8)
        codes = torch.bucketize(unit, (points[1:] + points[:-1]) / 2, right=True)
        if options.towards_zero:
            codes -= (points[codes].abs() > unit.abs()) * unit.sign().long()
        codes = codes.clamp(0, self.spec.levels) - (1 << self.spec.bits - 1)
        return Stored(pack(codes, self.spec.bits), length.half(), None)

    def numbers(self, stored: Stored, static: Static | None, options: Options) -> Tensor:  # noqa: ARG002  (of Arithmetic)
        assert stored.scale is not None
        codes = unpack(stored.codes, self.spec.bits) + (1 << self.spec.bits - 1)
        found = centroids(codes.shape[-1], self.spec.bits, codes.device)[codes.long()]
        return found / torch.sqrt(found.square().sum(-1, keepdim=True) + 1e-16) * stored.scale.float()


@cache
def centroids(size: int, bits: int, device: torch.device = CPU) -> Tensor:
    """Return the 2 ** bits numbers (C,) float32 that have the least squared error of a normal number with variance 1 / size.

    Lloyd's iteration from even steps over 3.5 standard deviations, each mean by the trapezoid rule over 200 steps.
    """
    deviation, count = 1 / math.sqrt(size), 1 << bits
    points = deviation * 7 * ((torch.arange(count, dtype=torch.float64) + 0.5) / count - 0.5)
    end = torch.tensor([10.5 * deviation], dtype=torch.float64)
    for _ in range(200):
        edges = torch.cat([-end, (points[1:] + points[:-1]) / 2, end])
        x = edges[:-1, None] + edges.diff()[:, None] * torch.arange(201, dtype=torch.float64) / 200
        density = (-x.square() / (2 * deviation**2)).exp()
        means = torch.trapezoid(x * density, x) / torch.trapezoid(density, x)
        if (means - points).abs().max() < 1e-10:
            break
        points = means
    return points.float().to(device)


ORACLES = tuple((Centroids if spec.arithmetic == "vllm_centroids" else Turboquant)(spec) for spec in TYPES)
