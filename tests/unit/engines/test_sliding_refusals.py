"""Backends refuse unsupported sliding windows and evictions before any work."""

from pathlib import Path

import pytest
from test_checkpoint_description import MISTRAL, make

from pipeline.config.compose import plan
from pipeline.loading import open_backend
from stages.checkpoints.description import CheckpointInfo, inspect_checkpoint
from stages.core.errors import UserError
from stages.engines.backend import Job
from stages.policies.policy import Eviction

SLIDES = r"^model\.path=.*: config\.json: 3 of 3 layers attend to their last 32 tokens alone: .*backend=onnxruntime"


def model(folder: Path, window: int | None) -> CheckpointInfo:
    """Return a three-layer Mistral with a sliding window in tokens, or with full attention if `window` is None."""
    return inspect_checkpoint(make(folder, **MISTRAL, sliding_window=window, hidden_size=256))


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
def test_a_backend_that_is_not_known_to_keep_to_windows_refuses_the_model(backend: str, message: str, tmp_path: Path) -> None:
    policy = "fp8_uncalibrated" if backend in ("vllm", "sglang") else "fp8"
    (config,) = plan([f"kv={policy}", *f"backend={backend}".split()], multirun=False).jobs
    with pytest.raises(UserError, match=message):
        open_backend(config.backend).check_inputs(Job("all", config.kv, "none", model(tmp_path, 32)))


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
    eviction: Eviction, holder: str, backend: str, tmp_path: Path
) -> None:
    (config,) = plan(["kv=fp8_uncalibrated", f"backend={backend}"], multirun=False).jobs
    job = Job("all", config.kv.model_copy(update={"eviction": eviction}), "none", model(tmp_path, None))
    with pytest.raises(UserError, match=holder):
        open_backend(config.backend).check_inputs(job)
    reached = ["backend=onnxruntime"] if "onnxruntime" in holder else ["backend=torch", "backend.device=cpu"]
    (held,) = plan(["kv=fp8_uncalibrated", *reached], multirun=False).jobs
    open_backend(held.backend).check_inputs(job)
