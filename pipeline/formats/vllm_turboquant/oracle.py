"""The arithmetic in torch, number by number as vLLM 0.32.0 has it (vllm/v1/attention/ops/triton_turboquant_store.py).

vLLM puts neighbouring channels into a byte, where kvgate puts channels i and D / 2 + i: the codes are the same, not their
places. On a GPU vLLM's divisions are a unit or two in the last place off. tests/real_vllm holds this to vLLM's code.
"""

from torch import Tensor

from pipeline.formats.oracle import Integer, Options, Static, Stored, pack
from pipeline.formats.vllm_turboquant.spec import SMALLEST_SCALE, VLLM_TURBOQUANT


class Turboquant(Integer):
    """INT4 from minimum to maximum of a token and head: codes of the unrounded scale and minimum, half a step up."""

    def store(self, x: Tensor, static: Static | None, options: Options) -> Stored:  # noqa: ARG002  (of Arithmetic)
        codes, scale, low = turboquant(x, towards_zero=options.towards_zero)
        return Stored(pack(codes - 8, 4), scale, low)


def turboquant(x: Tensor, *, towards_zero: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes 0 to 15 (..., D) float32, and scales and minima (..., 1) float16. `towards_zero` leaves the half out."""
    levels = VLLM_TURBOQUANT.levels
    low, high = x.aminmax(dim=-1, keepdim=True)
    scale = ((high - low) / levels).clamp(min=SMALLEST_SCALE)
    codes = ((x - low) / scale + (0.0 if towards_zero else 0.5)).trunc().clamp(0, levels)
    return codes, scale.half(), low.half()


ORACLE = Turboquant(VLLM_TURBOQUANT)
