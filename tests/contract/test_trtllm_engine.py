"""TensorRT-LLM's engines on the fake: tests in addition to tests/contract/test_interpreters.py."""

import json
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from helpers.engines.interpreter_bundles import make_bundle, open_engine
from helpers.engines.interpreters import make_interpreter
from helpers.engines.trtllm_exports import HEAD_DIM, HEADS, KV_HEADS, make_exports
from safetensors.torch import load_file

from stages.core.errors import MissingRequirement, UserError

PROMPT = [7, 300, 12, 44, 1001, 5, 5, 620]
ANSWER = [9, 13, 700, 700, 2, 1343, 0, 88, 15, 640, 3]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trtllm")


@pytest.fixture(scope="module")
def python(work: Path) -> str:
    return make_interpreter(work / "engine")


@pytest.fixture(scope="module")
def bundles(work: Path, tiny_checkpoint: Path, python: str) -> dict[str, Path]:
    bundles = {}
    for kv in ("fp16", "fp8", "int8_tensor"):
        quantized = make_exports(tiny_checkpoint, work / f"quantized-{kv}", kv)
        bundles[kv] = make_bundle("trtllm", quantized, work / kv, kv, python)
    return bundles


def test_each_cache_is_read_in_its_own_format(bundles: dict[str, Path], python: str) -> None:
    rows = {}
    for kv in ("fp16", "fp8", "int8_tensor"):
        engine = open_engine(bundles[kv], python)
        rows[kv] = engine.forced([*PROMPT, *ANSWER], len(PROMPT))
        engine.close()
    assert all(0.01 < np.abs(rows[kv] - rows["fp16"]).max() < 1.0 for kv in ("fp8", "int8_tensor"))
    assert np.abs(rows["fp8"] - rows["int8_tensor"]).max() > 0.01


def test_prompts_beyond_the_bound_are_in_flight_together(bundles: dict[str, Path], python: str) -> None:
    engine = open_engine(bundles["fp8"], python)
    prompts, limits = [PROMPT, ANSWER, PROMPT[:3], ANSWER[:1], PROMPT[::-1]], [9, 2, 5, 12, 1]
    alone = [engine.generate([prompt], limit, ())[0] for prompt, limit in zip(prompts, limits, strict=True)]
    engine._call = call = Mock(wraps=engine._call)
    assert engine.generate(prompts, limits, (), max_sequences=2) == alone
    assert call.call_count == 2 * 2 + 1, "prefill and decode of two pairs; prefill of the last"
    assert engine.memory().live_tokens == 0
    engine.close()


def test_one_engine_uses_the_gpu_and_fp16_has_no_control(bundles: dict[str, Path], python: str) -> None:
    first = open_engine(bundles["fp8"], python)
    second = open_engine(bundles["fp16"], python)
    with pytest.raises(UserError, match="kv=fp16: the cache has no scale"):
        second.corrupt_key_scale(0.1)
    tokens = [*PROMPT, *ANSWER]
    before = first.forced(tokens, len(PROMPT))
    second.forced(tokens, len(PROMPT))
    assert first._worker is None
    np.testing.assert_array_equal(first.forced(tokens, len(PROMPT)), before)
    assert second._worker is None
    first.close()


def test_two_ranks_together_hold_the_checkpoint_of_one(work: Path, tiny_checkpoint: Path, python: str) -> None:
    quantized = make_exports(tiny_checkpoint, work / "quantized-tp", "fp8")
    wide = make_interpreter(work / "wide", gpus=("9.0", "9.0"))
    bundle = make_bundle("trtllm", quantized, work / "tp", "fp8", wide, tensor_parallel_size=2)
    unsplit = load_file(quantized / "tensorrt_llm" / "rank0.safetensors")
    parts = [load_file(bundle / "checkpoint" / f"rank{rank}.safetensors") for rank in range(2)]
    for name, tensor in unsplit.items():
        pair = [part[name] for part in parts]
        if "qkv" in name:
            ends = (HEADS * HEAD_DIM // 2, (HEADS + KV_HEADS) * HEAD_DIM // 2)
            sides = zip(*(part.tensor_split(ends) for part in pair), strict=True)
            joined = torch.cat([torch.cat(side) for side in sides])
        elif name.endswith(("dense.weight", "proj.weight")):
            joined = torch.cat(pair, 1)
        elif tensor.ndim == 2:
            joined = torch.cat(pair)
        else:
            assert torch.equal(pair[0], pair[1])
            joined = pair[0]
        assert torch.equal(joined, tensor), name
    engine = open_engine(bundle, wide)
    single = open_engine(make_bundle("trtllm", quantized, work / "one", "fp8", python), python)
    tokens = [*PROMPT, *ANSWER]
    np.testing.assert_array_equal(engine.forced(tokens, len(PROMPT)), single.forced(tokens, len(PROMPT)))
    assert len(json.loads((bundle / "bundle.json").read_text())["gpus"]) == 2
    with pytest.raises(UserError, match=r"backend\.tensor_parallel_size=2: GPUs 0 to 1 are SM 9\.0, 8\.9"):
        open_engine(bundle, make_interpreter(work / "unequal", gpus=("9.0", "8.9")))
    with pytest.raises(MissingRequirement, match="needs 2 NVIDIA GPU"):
        open_engine(bundle, python)
    single.close()
