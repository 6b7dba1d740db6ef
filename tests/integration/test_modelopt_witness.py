"""An outside witness: what NVIDIA ModelOpt rounds of the same numbers with the same scales, against the oracle.

ModelOpt multiplies by limit / amax where the contract divides by amax / limit: 2^-22 of the largest number of a vector without
a crossed tie (CLOSE allows four times as much). A tie is crossed where a quotient lies on it to within float32's 2^-24: for
int8 about one number in 10^5 (TIES).
"""

import pytest
import torch
from modelopt.torch.export.quant_utils import postprocess_state_dict
from modelopt.torch.quantization.config import QuantizerAttributeConfig
from modelopt.torch.quantization.nn import TensorQuantizer
from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor
from shipped import SHIPPED
from torch import Tensor

from pipeline.checkpoint.exports import UNIFIED_HF_KV, export_refusal
from pipeline.core.formats import Format, Rotation
from pipeline.core.kv import KVPolicy
from pipeline.formats.oracle import Static
from stages.engines.oracle.formats import dequantize, hadamard, quantize

torch.set_num_threads(1)

NVFP4 = SHIPPED["nvfp4"].key
CLOSE = 2.0**-20
TIES = 1e-5


def numbers() -> Tensor:
    """(heads, tokens, channels); the largest saturate."""
    return torch.randn(2, 2000, 64, generator=torch.Generator().manual_seed(0))


def rounded(x_HTD: Tensor, form: Format, amax: float) -> Tensor:
    static = Static(torch.full((1, 1, 1), amax / form.largest), None)
    return dequantize(quantize(x_HTD, form, static), form, static)


@pytest.mark.parametrize(("dtype", "bits"), [("fp8_e4m3", (4, 3)), ("int8", 8), ("int4", 4)])
def test_modelopt_and_the_oracle_round_alike(dtype: str, bits: int | tuple[int, int]) -> None:
    x, form = numbers(), Format(dtype=dtype, granularity="per_tensor", scale="calibrated")
    quantizer = TensorQuantizer(QuantizerAttributeConfig(num_bits=bits, axis=None, narrow_range=True), amax=3.0)
    mine, theirs = rounded(x, form, 3.0), quantizer(x)
    assert float(((mine - theirs).abs() > CLOSE * x.abs().amax(-1, keepdim=True)).float().mean()) <= TIES
    assert (mine != x).float().mean() > 0.5


@pytest.mark.parametrize("rotation", ["none", "hadamard"])
def test_nvfp4_is_bit_for_bit_what_modelopt_packs(rotation: Rotation) -> None:
    """ModelOpt rounds NVFP4 of a cache on a GPU alone; what packs its weights runs anywhere, and is the same arithmetic."""
    x, form = numbers(), NVFP4.model_copy(update={"rotation": rotation})
    turned = x @ hadamard(64) if rotation == "hadamard" else x.clone()
    packed, scales, layer_scale = NVFP4QTensor.quantize(turned, 16, None, torch.tensor(3.0 / form.largest))
    theirs = packed.dequantize(torch.float32, scale=scales, double_scale=layer_scale, block_sizes={-1: 16})
    assert torch.equal(rounded(x, form, 3.0), theirs @ hadamard(64) if rotation == "hadamard" else theirs)


def test_modelopt_exports_nvfp4_with_six_times_the_scale_that_its_quantizer_takes() -> None:
    """Why no export of NVFP4 is written: auto-round and the quantizer itself divide amax by 6 * 448."""
    name = "model.layers.0.self_attn.k_bmm_quantizer._amax"
    ((exported, scale),) = postprocess_state_dict({name: torch.tensor(21.0)}, 448, "NVFP4").items()
    assert exported == "model.layers.0.self_attn.k_proj.k_scale"
    assert scale.item() == pytest.approx(21 / 448)
    assert scale.item() == pytest.approx(6 * 21 / NVFP4.largest)
    policy = KVPolicy(name="nvfp4", key=NVFP4, value=NVFP4)
    assert "a factor of 6" in str(export_refusal(policy, UNIFIED_HF_KV))
