"""llama.cpp's types in the reference engine, compared with the reader in the package gguf.

tests/real_llamacpp/test_llamacpp_engine.py makes the same comparison with ggml's own code.
"""

import numpy as np
import pytest
import torch
from ggml_cases import NAMES, form_of, raw, vectors
from gguf import GGMLQuantizationType, quants
from pydantic import ValidationError

from pipeline.chain.inputs import check_inputs
from pipeline.config.compose import plan
from stages.core.errors import UserError
from stages.engines.reference.formats import dequantize, quantize
from stages.policies.formats import Format
from stages.policies.ggml.arithmetic_torch import asked


@pytest.mark.parametrize("name", NAMES)
def test_the_bytes_mean_what_ggufs_reader_reads_of_them(name: str) -> None:
    form = form_of(name)
    stored = quantize(vectors(), form, None)
    bytes_ = raw(stored)
    assert bytes_.shape[-1] == form.token_bytes(64)
    expected = quants.dequantize(bytes_, GGMLQuantizationType[name.upper()])
    np.testing.assert_array_equal(dequantize(stored, form, None).numpy(), expected)


def test_hadamard_64_rotates_each_64_channels_and_goes_back() -> None:
    x = torch.randn(1, 3, 128, generator=torch.Generator().manual_seed(1))
    blocks = form_of("q8_0", "hadamard_64")
    halves = [quantize(part, form_of("q8_0", "hadamard"), None) for part in x.chunk(2, dim=-1)]
    assert torch.equal(quantize(x, blocks, None).codes, torch.cat([half.codes for half in halves], dim=-1))
    assert (dequantize(quantize(x, blocks, None), blocks, None) - x).abs().max() < 0.05


def test_queries_are_rounded_to_blocks_of_8_bits() -> None:
    x = vectors()
    expected = quants.dequantize(quants.quantize(x.numpy(), GGMLQuantizationType.Q8_0), GGMLQuantizationType.Q8_0)
    assert np.abs(asked(x).numpy() - expected).max() <= np.abs(x.numpy()).max() / 127
    assert (asked(x).numpy() != expected).mean() < 2e-3


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"group_size": 64}, "dtype q4_0 requires granularity=per_group group_size=32 symmetric=true"),
        ({"symmetric": False}, "dtype q4_0 requires granularity=per_group group_size=32 symmetric=true"),
        ({"scale": "calibrated"}, "scale must be dynamic for q4_0 per_group"),
        ({"dtype": "int4", "rotation": "hadamard_64"}, "rotation hadamard_64 requires a type of llama.cpp, got dtype int4"),
    ],
)
def test_what_llama_cpp_has_no_such_type_of_is_refused(changed: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Format.model_validate(form_of("q4_0").model_dump() | changed)


@pytest.mark.parametrize("backend", ["onnxruntime", "tensorrt_rtx"])
def test_graphs_refuse_the_types_and_name_the_engine_that_has_them(backend: str) -> None:
    (job,) = plan([f"backend={backend}", "kv=llamacpp_q4_0"], multirun=False).jobs
    with pytest.raises(UserError, match=r"^kv\.key\.dtype=q4_0: .*; use backend=torch backend\.device=cpu, or"):
        check_inputs(job)
