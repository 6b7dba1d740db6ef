"""What a backend is not known to keep to, windows of the model or an eviction, it refuses before any work."""

import json
from pathlib import Path

import pytest

from pipeline.artifacts.backend import Job
from pipeline.checkpoint.description import CheckpointInfo, inspect_checkpoint
from pipeline.config.compose import plan
from pipeline.core.errors import UserError
from pipeline.core.kv import Eviction
from pipeline.loading import open_loader

SLIDES = r"^model\.path=.*: config\.json: 3 of 3 layers attend to their last 32 tokens alone: .*backend=onnxruntime"


@pytest.fixture
def checkpoint(tmp_path: Path) -> CheckpointInfo:
    return written(tmp_path, 32)


@pytest.fixture
def full(tmp_path: Path) -> CheckpointInfo:
    """A model whose layers attend to all tokens."""
    return written(tmp_path, None)


def written(tmp_path: Path, window: int | None) -> CheckpointInfo:
    config = {
        "architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window, "hidden_size": 256,
        "intermediate_size": 512,
        "max_position_embeddings": 40960, "num_attention_heads": 4, "num_hidden_layers": 3, "num_key_value_heads": 2,
        "vocab_size": 1000,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "tokenizer.json").write_text("{}")
    return inspect_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("tensorrt_rtx", SLIDES),
        ("tensorrt", SLIDES),
        ("trtllm", SLIDES),
        ("vllm", SLIDES),
        ("sglang", SLIDES),
        ("torch backend.device=cuda", r"^model\.path: sliding_window=32: with the CUDA kernels .*; set backend\.device=cpu$"),
    ],
)
def test_a_backend_that_is_not_known_to_keep_to_windows_refuses_the_model(
    backend: str, message: str, checkpoint: CheckpointInfo
) -> None:
    policy = "fp8_uncalibrated" if backend in ("vllm", "sglang") else "fp8"
    (config,) = plan([f"kv={policy}", *f"backend={backend}".split()], multirun=False).jobs
    with pytest.raises(UserError, match=message):
        open_loader(config.backend).check_inputs(Job("all", config.kv, "none", checkpoint))


@pytest.mark.parametrize("backend", ["tensorrt", "tensorrt_rtx", "vllm", "sglang"])
@pytest.mark.parametrize(
    ("eviction", "holder"),
    [
        (Eviction(window_tokens=128), "or backend=onnxruntime, which"),
        (Eviction(window_tokens=128, heavy_tokens=64), "or backend=torch backend.device=cpu, which"),
    ],
    ids=["window", "heavy"],
)
def test_an_eviction_is_refused_with_the_backend_that_holds_it(
    eviction: Eviction, holder: str, backend: str, full: CheckpointInfo
) -> None:
    (config,) = plan(["kv=fp8_uncalibrated", f"backend={backend}"], multirun=False).jobs
    evicting = config.kv.model_copy(update={"eviction": eviction})
    with pytest.raises(UserError, match=holder):
        open_loader(config.backend).check_inputs(Job("all", evicting, "none", full))
    reached = ["backend=onnxruntime"] if "onnxruntime" in holder else ["backend=torch", "backend.device=cpu"]
    (held,) = plan(["kv=fp8_uncalibrated", *reached], multirun=False).jobs
    open_loader(held.backend).check_inputs(Job("all", evicting, "none", full))
