"""The reference engine: its device, weights kept in 16 bits, and the memory of its attention."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.engines.gpu import pretend_gpu
from helpers.policies.shipped import SHIPPED

from benchmarks import benchlib
from pipeline.chain.inputs import check_inputs
from pipeline.chain.job import Run
from pipeline.config.compose import plan
from stages.core.errors import MissingRequirement
from stages.engines.gpu import MIN_BYTES, reference_device
from stages.engines.reference import attention
from stages.engines.reference.attention import BLOCK_BYTES, BLOCK_ROWS, Span
from stages.engines.reference.engine import TorchEngine
from stages.engines.reference.model import place_model, store_in_16_bits, within_memory
from stages.policies.policy import FP16_POLICY

CPU = torch.device("cpu")


def test_auto_is_a_gpu_for_models_that_are_not_tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch)
    assert reference_device("auto", MIN_BYTES) == reference_device("cuda", 1) == "cuda"
    assert reference_device("auto", MIN_BYTES - 1) == reference_device("cpu", 1 << 40) == "cpu"
    pretend_gpu(monkeypatch, present=False)
    assert reference_device("auto", MIN_BYTES) == "cpu"
    with pytest.raises(MissingRequirement, match=r"^reference\.device=cuda: .* no NVIDIA GPU here; set reference\.device=auto"):
        reference_device("cuda", MIN_BYTES)


@pytest.mark.parametrize("has_device", [False, True])
def test_the_reference_engines_gpu_is_part_of_an_evaluations_key(
    has_device: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpu(monkeypatch, present=has_device)
    parts: list[Any] = []
    for device in ("auto", "cuda" if has_device else "cpu"):
        (job,) = plan([f"workdir={tmp_path}", f"reference.device={device}"], multirun=False).jobs
        steps, artifact = Run(job).verdict_steps, SimpleNamespace(digest="0")
        artifacts: Any = {"reference": artifact}
        parts += [steps.recipe("round", inputs).parts for inputs in (artifacts, dict[str, Any]())]
    beside, alone = parts[2:]
    assert parts[:2] == [alone | {"inputs": beside["inputs"]}, alone], "auto is a CPU for the tiny model"
    reference = {"device": "cuda", "gpu": "NVIDIA H200", "compute_capability": "9.0"}
    assert beside["config"] == alone["config"] | ({"reference": reference} if has_device else {})


def test_16_bit_weights_give_the_same_logits_bit_for_bit() -> None:
    text = benchlib.story_tokens(1, 200)[0].tolist()
    models = [benchlib.load_model() for _ in range(2)]
    exact = models[1].model.layers[1].mlp.up_proj.weight
    for model in models:  # adds a value that 16 bits cannot represent
        model.model.layers[1].mlp.up_proj.weight.data += 2.0**-20 / 3
    assert place_model(models[0], CPU) is models[0]
    store_in_16_bits(models[1], CPU)
    for _ in range(2):
        wide, short = (TorchEngine.from_model(model, SHIPPED["int8"]).forced(text, 100) for model in models)
        assert wide.tobytes() == short.tobytes()
        dtypes = {name: weight.dtype for name, weight in models[1].named_parameters()}
        assert [name for name, dtype in dtypes.items() if dtype == torch.float32] == ["model.layers.1.mlp.up_proj.weight"]
        assert models[1].model.layers[1].mlp.up_proj.weight is exact
    assert {weight.dtype for weight in models[0].parameters()} == {torch.float32}
    tied = models[1].config.tie_word_embeddings
    assert (models[1].lm_head.weight is models[1].model.embed_tokens.weight) == tied
    projection = models[1].model.layers[0].self_attn.q_proj
    with pytest.raises(RuntimeError):
        projection(torch.zeros(1, 3))
    assert projection.weight.dtype in (torch.float16, torch.bfloat16), "the weights have 16 bits again after an error"


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("CUBLAS_STATUS_ALLOC_FAILED")])
def test_a_gpu_without_room_is_reported_in_one_line(error: RuntimeError) -> None:
    with (
        pytest.raises(MissingRequirement, match=r"backend\.gpu_memory_utilization .* reference\.device=cpu$"),
        within_memory(torch.device("cuda")),
    ):
        raise error
    with pytest.raises(RuntimeError, match="another"), within_memory(torch.device("cuda")):
        raise RuntimeError("another")


def test_a_blocks_scores_are_bounded_for_any_context() -> None:
    for row_bytes in (100, 1 << 19, 1 << 22):
        blocks = attention.plan_blocks(FP16_POLICY, [Span(0, 1000, 0)], row_bytes)
        rows = max(block.end - block.begin for block in blocks)
        assert rows == min(BLOCK_ROWS, BLOCK_BYTES // row_bytes)
    assert max(block.end - block.begin for block in attention.plan_blocks(FP16_POLICY, [Span(0, 9, 0)], 2 * BLOCK_BYTES)) == 1


def test_a_missing_requested_gpu_is_reported_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """stage=build runs no engine."""
    pretend_gpu(monkeypatch, present=False)
    for stage in ("all", "evaluate", "build"):
        (job,) = plan([f"workdir={tmp_path}", f"stage={stage}", "reference.device=cuda", "tracking=none"], multirun=False).jobs
        refused = pytest.raises(MissingRequirement, match=r"^reference\.device=cuda")
        with nullcontext() if stage == "build" else refused:
            check_inputs(job)
