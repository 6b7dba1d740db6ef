"""turboquant_k8v4 in torch, with the exact numbers of vLLM 0.32.0 (vllm/v1/attention/ops/triton_turboquant_store.py).

vLLM packs adjacent channels into a byte, kvgate channels i and D / 2 + i; the codes are identical. On a GPU vLLM's divisions
deviate by a unit or two in the last place. tests/real_vllm compares this module with vLLM's code.
"""

from torch import Tensor

from stages.policies.arithmetic_torch import Integer, Options, Static, Stored, divide
from stages.policies.table import TURBOQUANT_SMALLEST_SCALE, VLLM_TURBOQUANT


class Turboquant(Integer):
    """INT4 codes from the unrounded scale and minimum of a token and head, rounded half up."""

    def store(self, x: Tensor, static: Static | None, options: Options) -> Stored:  # noqa: ARG002
        low, high = x.aminmax(dim=-1, keepdim=True)
        scale = divide(high - low, self.spec.levels).clamp(min=TURBOQUANT_SMALLEST_SCALE)
        return Stored(self.encode(((x - low) / scale + 0.5).trunc(), options), scale.half(), low.half())


ARITHMETIC = Turboquant(VLLM_TURBOQUANT)
