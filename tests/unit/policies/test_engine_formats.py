"""Formats of vLLM and llama.cpp in the reference engine, against their definition number by number and the package gguf.

tests/real_vllm/test_vllm_codes.py compares with vLLM's own kernels, tests/real_llamacpp/test_llamacpp_engine.py with ggml.
"""

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from helpers.policies import ggml
from helpers.policies.ggml import form_of
from torch import Tensor

from pipeline.chain.inputs import check_inputs
from pipeline.config.compose import plan
from stages.core.errors import UserError
from stages.engines.reference.formats import dequantize, quantize
from stages.policies.ggml.arithmetic_torch import round_queries


def vectors() -> Tensor:
    """Return the vectors of ggml's tests, (2, 12, 64), some with ties."""
    x = ggml.vectors()
    x[:, 4] = torch.arange(64) % 31 * 0.5
    return x


def test_hadamard_64_rotates_blocks_of_64_and_is_inverted() -> None:
    x = torch.randn(1, 3, 128, generator=torch.Generator().manual_seed(1))
    blocks = form_of("q8_0", "hadamard_64")
    halves = [quantize(part, form_of("q8_0", "hadamard"), None) for part in x.chunk(2, dim=-1)]
    assert torch.equal(quantize(x, blocks, None).codes, torch.cat([half.codes for half in halves], dim=-1))
    assert (dequantize(quantize(x, blocks, None), blocks, None) - x).abs().max() < 0.05


def test_queries_are_rounded_to_blocks_of_8_bits() -> None:
    x = ggml.vectors()
    expected = quants.dequantize(quants.quantize(x.numpy(), GGMLQuantizationType.Q8_0), GGMLQuantizationType.Q8_0)
    assert np.abs(round_queries(x).numpy() - expected).max() <= np.abs(x.numpy()).max() / 127
    assert (round_queries(x).numpy() != expected).mean() < 2e-3


@pytest.mark.parametrize(
    ("backend", "kv", "message"),
    [
        ("onnxruntime", "vllm_int4", r"arithmetic=vllm_\w+: .*; use backend=torch .* kv\.key\.rotation=hadamard$"),
        ("tensorrt_rtx", "vllm_int8", r"arithmetic=vllm_\w+: .*; use backend=torch .*, or set kv\.key\.arithmetic=kvgate$"),
        ("onnxruntime", "llamacpp_q4_0", r"dtype=q4_0: .*; use backend=torch backend\.device=cpu, or"),
    ],
)
def test_graphs_refuse_and_name_reference_only_formats(backend: str, kv: str, message: str) -> None:
    (job,) = plan([f"backend={backend}", f"kv={kv}"], multirun=False).jobs
    with pytest.raises(UserError, match=rf"^kv\.key\.{message}"):
        check_inputs(job)
