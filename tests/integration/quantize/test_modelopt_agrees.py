"""NVIDIA ModelOpt's quantizers as an independent check of the reference engine's arithmetic.

The vectors are a fifth larger than in calibration, so that some numbers saturate. ModelOpt multiplies by limit / amax, whereas
kvgate divides by amax / limit. So a quotient within float32's 2^-24 of a tie may round to the other code: for int8 about one
number in 10^5 (TIES). All other results differ by at most 2^-22 of a vector's largest number, or 2^-21 through a rotation
(CLOSE allows twice that).
"""

from typing import Any

import pytest
import torch
from helpers.engines.random_llama import FP8, fmt
from helpers.policies.formats import fixed, name
from helpers.policies.shipped import SHIPPED
from torch import Tensor

from stages.engines.reference.formats import dequantize, quantize, rotate
from stages.policies.formats import Format, Rotation

NVFP4 = SHIPPED["nvfp4"].key
CLOSE, TIES = 2.0**-20, 1e-5
BITS = {"fp8_e4m3": (4, 3), "int8": 8, "int4": 4}
"""ModelOpt's num_bits: bits, or (exponent bits, mantissa bits)."""
AXES: dict[str, tuple[int, ...] | None] = {"per_tensor": None, "per_head": (1,), "per_channel": (1, 3), "per_token": (0, 1, 2)}
"""ModelOpt's `axis` for states (1, H, T, D) by granularity."""


@pytest.fixture
def vectors() -> Tensor:
    """Vectors (2, 1000, 64) of many magnitudes."""
    random = torch.Generator().manual_seed(0)
    return torch.randn(2, 1000, 64, generator=random) * torch.exp2(torch.randn(2, 1000, 1, generator=random))


@pytest.mark.parametrize("rotation", ["none", "hadamard"])
def test_nvfp4_is_bit_for_bit_the_packing_of_modelopt(rotation: Rotation, vectors: Tensor) -> None:
    """ModelOpt rounds an NVFP4 cache only on a GPU. Its packing of weights runs anywhere and uses the same arithmetic."""
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    form = NVFP4.model_copy(update={"rotation": rotation})
    static = fixed(vectors / 1.2, form)
    assert static is not None
    packed, scales, layer_scale = NVFP4QTensor.quantize(rotate(vectors, form).clone(), 16, None, static.scale.flatten()[0])
    theirs = packed.dequantize(torch.float32, scale=scales, double_scale=layer_scale, block_sizes={-1: 16})
    assert torch.equal(dequantize(quantize(vectors, form, static), form, static), rotate(theirs, form))


FORMS = [
    FP8,
    Format(dtype="fp8_e4m3", granularity="per_tensor", scale="uncalibrated"),
    fmt("int8", "per_tensor"),
    fmt("fp8_e4m3", "per_head"),
    fmt("int4", "per_channel"),
    fmt("int8", "per_head", rotation="hadamard"),
    fmt("fp8_e4m3", "per_token"),
    fmt("int8", "per_token"),
    fmt("int4", "per_token"),
    fmt("int4", "per_token", rotation="hadamard"),
]


@pytest.mark.parametrize("form", FORMS, ids=name)
def test_modelopt_and_the_reference_round_equally(form: Format, vectors: Tensor) -> None:
    """Dynamic scales are the cache's, which are float16; ModelOpt's own are float32."""
    from modelopt.torch.quantization.nn import TensorQuantizer

    static = fixed(vectors / 1.2, form)
    stored = quantize(vectors, form, static)
    scale = stored.scale if static is None else static.scale
    assert scale is not None
    amax, axis = scale.float()[None] * form.code.limit, AXES[form.granularity]
    quantizer: Any = TensorQuantizer()
    integer = {"narrow_range": True} if form.code.kind == "integer" else {}
    quantizer.set_from_attribute_config({"num_bits": BITS[form.dtype], "axis": axis, "enable": True, **integer})
    quantizer.amax = amax.reshape(()) if axis is None else amax
    theirs = rotate(quantizer(rotate(vectors, form)[None])[0], form)
    close = CLOSE * vectors.abs().amax(-1, keepdim=True)
    assert ((dequantize(stored, form, static) - theirs).abs() > close).float().mean() <= TIES
    assert ((vectors - theirs).abs() > close).float().mean() > 0.5
