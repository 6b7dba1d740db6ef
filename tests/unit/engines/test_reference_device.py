"""The reference engine's device, its effect on keys, and weights kept in 16 bits."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from shipped import SHIPPED

from benchmarks import benchlib
from pipeline.chain.inputs import check_inputs
from pipeline.chain.run import Run
from pipeline.config.compose import plan
from stages.core.errors import MissingRequirement
from stages.engines.reference.device import LEAST_BYTES, reference_device
from stages.engines.reference.engine import TorchEngine
from stages.engines.reference.placing import place, shorten, within_memory

CPU = torch.device("cpu")


def has_gpu(patch: pytest.MonkeyPatch, here: bool) -> None:
    patch.setattr(torch.version, "cuda", "13.0" if here else None)
    patch.setattr(torch.cuda, "is_available", lambda: here)
    patch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H100")
    patch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))


def test_auto_is_a_gpu_for_models_that_are_not_tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    has_gpu(monkeypatch, here=True)
    assert reference_device("auto", LEAST_BYTES) == reference_device("cuda", 1) == "cuda"
    assert reference_device("auto", LEAST_BYTES - 1) == reference_device("cpu", 1 << 40) == "cpu"
    has_gpu(monkeypatch, here=False)
    assert reference_device("auto", LEAST_BYTES) == "cpu"
    with pytest.raises(MissingRequirement, match=r"^reference\.device=cuda: .* no NVIDIA GPU here; set reference\.device=auto"):
        reference_device("cuda", LEAST_BYTES)


@pytest.mark.parametrize("stage", ["all", "evaluate", "build"])
def test_a_gpu_that_is_asked_for_and_missing_is_said_before_anything_is_made(
    stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_gpu(monkeypatch, here=False)
    (job,) = plan([f"workdir={tmp_path}", f"stage={stage}", "reference.device=cuda", "tracking=none"], multirun=False).jobs
    if stage == "build":  # runs no engine
        return check_inputs(job)
    with pytest.raises(MissingRequirement, match=r"^reference\.device=cuda"):
        check_inputs(job)
    return None


@pytest.mark.parametrize("here", [False, True])
def test_the_gpu_of_the_reference_engine_is_part_of_the_key_of_what_it_is_measured_beside(
    here: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_gpu(monkeypatch, here)
    parts: list[Any] = []
    for device in ("auto", "cuda" if here else "cpu"):
        (job,) = plan([f"workdir={tmp_path}", f"reference.device={device}"], multirun=False).jobs
        steps, artifact = Run(job).steps, SimpleNamespace(digest="0")
        given: Any = {"reference": artifact}
        parts += [steps.recipe("round", "measure", inputs).parts for inputs in (given, dict[str, Any]())]
    beside, alone = parts[2:]
    assert parts[:2] == [alone | {"inputs": beside["inputs"]}, alone], "auto is a CPU for the tiny model"
    reference = {"device": "cuda", "gpu": "NVIDIA H100", "compute_capability": "9.0"}
    assert beside["config"] == alone["config"] | ({"reference": reference} if here else {})


def test_weights_that_stay_in_16_bits_give_the_same_logits_bit_for_bit() -> None:
    text = benchlib.story_tokens(1, 200)[0].tolist()
    models = [benchlib.load_model() for _ in range(2)]
    exact = models[1].model.layers[1].mlp.up_proj.weight
    for model in models:  # adds a value that 16 bits cannot represent
        model.model.layers[1].mlp.up_proj.weight.data += 2.0**-20 / 3
    assert place(models[0], CPU) is models[0]
    shorten(models[1], CPU)
    for _ in range(2):
        wide, short = (TorchEngine.from_model(model, SHIPPED["int8"]).forced(text, 100) for model in models)
        assert wide.tobytes() == short.tobytes()
        dtypes = {name: weight.dtype for name, weight in models[1].named_parameters()}
        assert [name for name, dtype in dtypes.items() if dtype == torch.float32] == ["model.layers.1.mlp.up_proj.weight"]
        assert models[1].model.layers[1].mlp.up_proj.weight is exact
    assert {weight.dtype for weight in models[0].parameters()} == {torch.float32}
    tied = models[1].config.tie_word_embeddings
    assert (models[1].lm_head.weight is models[1].model.embed_tokens.weight) == tied


def test_a_module_gets_its_16_bit_weights_back_after_an_error() -> None:
    model = benchlib.load_model()
    shorten(model, CPU)
    projection = model.model.layers[0].self_attn.q_proj
    with pytest.raises(RuntimeError):
        projection(torch.zeros(1, 3))
    assert projection.weight.dtype in (torch.float16, torch.bfloat16)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("CUBLAS_STATUS_ALLOC_FAILED")])
def test_a_gpu_without_room_is_said_in_one_line(error: RuntimeError) -> None:
    with (
        pytest.raises(MissingRequirement, match=r"backend\.gpu_memory_utilization .* reference\.device=cpu$"),
        within_memory(torch.device("cuda")),
    ):
        raise error
    with pytest.raises(RuntimeError, match="another"), within_memory(torch.device("cuda")):
        raise RuntimeError("another")
