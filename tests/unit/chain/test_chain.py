"""The chain of artifacts names missing requirements."""

import shutil
import sys
from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module, metadata
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from stores import make_artifact

from pipeline.chain import sweeps
from pipeline.chain.engine_steps import EngineSteps
from pipeline.chain.inputs import check_inputs
from pipeline.chain.run import Run
from pipeline.chain.verdict_steps import VerdictSteps
from pipeline.config import CONF
from pipeline.config.compose import plan
from pipeline.config.config import Config
from pipeline.evidence.reading import USER_INPUTS
from pipeline.loading import open_backend, required_libraries
from pipeline.registry import summary
from pipeline.store import store as store_module
from pipeline.store.store import Store
from stages.core.artifact import Artifact, Recipe
from stages.core.digest import reachable_modules, tree_files
from stages.core.errors import MissingRequirement, UserError, exit_code
from stages.core.records import Sample
from stages.engines.config import backend_configs
from stages.engines.interpreter.backend import InterpreterBackend
from stages.engines.tensorrt.backend import RTXBackend, TensorRTBackend
from stages.evaluate.inputs.tokens import EncodedSample
from stages.policies.policy import KVPolicy
from stages.policies.scales import SCALES_FILE


def test_a_library_that_is_not_installed_is_named_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "stages.checkpoints.gguf.convert", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    fix = "^torch is not installed here: pip install torch$"
    with pytest.raises(MissingRequirement, match=fix) as caught, required_libraries():
        import_module("stages.checkpoints.gguf.convert")
    assert exit_code(caught.value) == 4


def test_a_module_of_ours_that_is_missing_is_a_defect() -> None:
    with pytest.raises(ModuleNotFoundError), required_libraries():
        import_module("stages.nothing")


def test_an_artifact_is_verified_once_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = Mock(wraps=tree_files)
    recipe = Recipe("demo", ("stages.policies.policy",), {}, {})
    store = Store(tmp_path)
    make_artifact(store, recipe, lambda _: None)
    monkeypatch.setattr(store_module, "tree_files", hashed)
    config: Any = None  # `making` does not use the configuration
    chain = EngineSteps(config, store)
    with chain.making(recipe) as first:
        pass
    with chain.making(recipe) as again:
        assert again.artifact is first.made
    assert hashed.call_count == 1
    assert len(chain.finished) == 1


def swap(link: Path) -> None:
    link.with_name("other").write_text("2")
    link.unlink()
    link.symlink_to("other")


@pytest.mark.parametrize("change", [swap, Path.unlink, lambda path: path.resolve().write_text("two")])
def test_nothing_is_made_of_a_file_that_was_changed_meanwhile(change: Callable[[Path], object], tmp_path: Path) -> None:
    config: Any = None  # `making` does not use the configuration
    chain, given = EngineSteps(config, Store(tmp_path / "store")), tmp_path / "given"
    (tmp_path / "one").write_text("1")
    given.symlink_to("one")
    recipe = Recipe("demo", ("stages.policies.policy",), {}, {"jsonl": chain.digest_of(given)})
    message = "given: was changed while this command read it; run the command again"
    with pytest.raises(UserError, match=message), chain.making(recipe):
        change(given)
    assert not chain.store.path(recipe).exists()


BACKEND_NAMES = sorted(backend_configs())


@pytest.mark.parametrize("name", BACKEND_NAMES)
def test_every_backend_of_the_configuration_has_a_folder_that_builds_and_loads(name: str) -> None:
    backend = open_backend(plan([f"backend={name}"], multirun=False).jobs[0].backend)
    builder = import_module(backend.build_module)  # the module's code is part of a bundle's key
    assert isinstance(backend, InterpreterBackend) or callable(builder.build_bundle)
    assert callable(import_module(backend.engine_module).load_engine)
    assert (CONF / "backend" / f"{name}.yaml").is_file()


class _Library:
    version = "10.14.1.48"


class _Made(EngineSteps):
    """A chain with existing inputs of plans."""

    def quantized(self, policy: KVPolicy) -> Artifact:  # noqa: ARG002
        return make_artifact(
            self.store, Recipe("quantize", ("stages.policies.policy",), {}, {}), lambda out: (out / SCALES_FILE).touch()
        )

    def bundle(self, policy: KVPolicy, config: Any = None) -> Artifact:
        if config is None:
            return super().bundle(policy)
        return make_artifact(self.store, Recipe("build", ("stages.policies.policy",), {}, {}), lambda _: None)


GPU = {"name": "NVIDIA H100", "compute_cap": "9.0", "driver_version": "580.1"}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine with TensorRT and a GPU. TensorRT's distribution is named tensorrt_cu13, not tensorrt."""
    monkeypatch.setattr("stages.engines.tensorrt.backend.load", lambda _: _Library)
    monkeypatch.setattr("stages.engines.tensorrt.backend.gpus", lambda: [GPU])
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: GPU["name"])
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    return monkeypatch


def configured(workdir: Path, *overrides: str) -> Config:
    return plan([f"workdir={workdir}", "tracking=none", *overrides], multirun=False).jobs[0]


def test_threads_that_are_not_given_are_the_physical_cores_and_part_of_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("psutil.cpu_count", lambda logical: None if logical else 6)
    parts = {}
    for given in ([], ["backend.threads=6"], ["backend.threads=2"]):
        config = configured(tmp_path, *given)
        recipe = Run(config).steps.recipe("baseline", "measure", {})
        parts[config.backend.model_dump()["threads"], bool(given)] = recipe.key
    assert set(parts) == {(6, False), (6, True), (2, True)}
    assert parts[6, False] == parts[6, True] != parts[2, True]


def test_the_files_of_a_draft_are_part_of_the_key_of_what_it_drafts_for(tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    shutil.copytree(import_module("stages.tiny").__path__[0] + "/checkpoint", draft)
    config = configured(tmp_path, f"workloads.speculation={{draft:{draft}}}")
    check_inputs(config)
    before = Run(config).steps.recipe("round", "measure", {})
    (draft / "generation_config.json").write_text("{}")
    after = Run(config).steps.recipe("round", "measure", {})
    assert before.key != after.key
    assert before.inputs["draft"] != after.inputs["draft"]
    assert "draft" in USER_INPUTS


@pytest.mark.parametrize(
    ("backend", "versions"),
    [
        ("tensorrt", {"tensorrt": "10.14.1.48", "triton": metadata.version("triton")}),
        ("tensorrt_rtx", {"tensorrt_rtx": "10.14.1.48"}),
    ],
)
def test_the_key_of_plans_has_the_version_of_the_library_that_was_imported(
    backend: str, versions: dict[str, str], tmp_path: Path, machine: pytest.MonkeyPatch
) -> None:
    given: dict[str, object] = {}

    def build(reference: Path, out: Path, **options: object) -> None:  # noqa: ARG001
        given.update(options)

    machine.setattr("stages.engines.tensorrt.build.build_bundle", build)
    config = configured(tmp_path, f"backend={backend}")
    chain = _Made(config, Store(tmp_path))
    made = chain.bundle(config.kv)
    parts: Any = made.parts
    assert parts["config"]["versions"] == versions
    assert parts["config"].get("gpu") == (GPU if backend == "tensorrt" else None)
    assert set(parts["libraries"]) == {"onnx", "numpy"}
    assert given.keys() - {"adapt"} == {*parts["config"], "policy", "scales", "progress"} - {"kv", "versions"}
    machine.setattr(_Library, "version", "10.15")
    assert _Made(config, Store(tmp_path)).bundle(config.kv).key != made.key


def test_running_plans_takes_torch_and_nothing_that_built_them(tmp_path: Path, machine: pytest.MonkeyPatch) -> None:
    machine.setattr("stages.engines.tensorrt.backend.triton_version", lambda: None)
    parts: Any = Run(configured(tmp_path, "backend=tensorrt")).steps.recipe("evaluate", "joining", {}).parts
    assert parts["config"]["versions"] == {"tensorrt": "10.14.1.48"}
    assert {"torch", "numpy"} <= set(parts["libraries"])
    assert "triton" not in parts["libraries"]
    assert not [name for name in reachable_modules("stages.engines.tensorrt.engine") if name.startswith("plugins")]


@pytest.mark.parametrize(
    ("lacking", "stage", "kv", "message"),
    [
        ("gpu", "build", "fp8k_int4v", r"has none with a driver \(nvidia-smi\); backend=tensorrt_rtx builds without one"),
        ("torch", "all", "fp8k_int4v", "install a CUDA build of torch"),
        ("triton", "build", "fp8k_int4v", r"needs Triton .*kvgate\[kernels\]"),
        ("triton", "evaluate", "int8_asym", "needs Triton"),  # the kernels support the baseline's keys
        ("triton", "build", "int8_asym", None),
        ("gpu", "quantize", "fp8k_int4v", None),
        ("nothing", "all", "fp8k_int4v", None),
    ],
)
def test_what_plans_need_is_asked_for_before_any_work(
    lacking: str, stage: str, kv: str, message: str | None, tmp_path: Path, machine: pytest.MonkeyPatch
) -> None:
    found = {"gpu": ("stages.engines.tensorrt.backend.gpus", list), "torch": ("torch.cuda.is_available", lambda: False),
             "triton": ("stages.engines.tensorrt.backend.triton_version", lambda: None)}  # fmt: skip
    if lacking in found:
        machine.setattr(*found[lacking])
    config = configured(tmp_path, "backend=tensorrt", f"stage={stage}", f"kv={kv}")
    with pytest.raises(MissingRequirement, match=message) if message is not None else nullcontext():
        check_inputs(config)


def test_the_default_profile_of_plans_fits_the_built_in_workloads(tmp_path: Path) -> None:
    config: Any = configured(tmp_path, "backend=tensorrt_rtx")
    assert config.backend.max_batch >= max(config.workloads.batch_size, config.workloads.load.batch)


@pytest.mark.parametrize(("allowed", "noted"), [(704, True), (640, False)])
def test_an_engine_that_allows_more_than_is_asked_is_noted_before_it_is_judged(
    allowed: int, noted: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = configured(tmp_path, "backend=tensorrt_rtx", f"backend.max_tokens={allowed}")
    room = config.workloads.extra_new_tokens
    item = EncodedSample(Sample(id="a", workload="b", prompt="", reference=""), (0,) * 570, (0,) * (591 - 570 - room))
    Run(config).steps.note_length([item])
    said = " ".join(capsys.readouterr().out.split())
    advice = "the samples have at most 591 tokens; give backend.max_tokens=640, or workloads.lengths=[704] (15 documents"
    assert (advice in said) is noted


def test_the_key_of_plans_for_rtx_does_not_depend_on_the_plugin() -> None:
    assert {"plugins.kv_attention.kernels.decode", "stages.engines.tensorrt.build"} <= set(
        reachable_modules(TensorRTBackend.build_module)
    )
    assert not [name for name in reachable_modules(RTXBackend.build_module) if name.startswith("plugins")]


def test_the_reference_shares_no_arithmetic_with_the_onnx_engine() -> None:
    assert not [name for name in reachable_modules("stages.engines.reference.engine") if name.startswith("stages.engines.onnx")]


def test_without_compared_requests_no_reference_engine_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    (job,) = plan(["experiment=quick", "kv=fp8"], multirun=False).jobs
    steps = Run(job).steps
    vars(steps).update(encoded_samples=Mock(), bundle=Mock())
    monkeypatch.setattr(VerdictSteps, "reference", lambda *_: pytest.fail("the reference engine is not asked for anything"))
    assert "reference" not in steps.inputs(job.kv, None)


def test_a_sweep_of_a_stage_that_judges_nothing_leaves_the_candidates_of_the_last_one(tmp_path: Path) -> None:
    summary.begin(tmp_path, "judged", ["fp8"])
    planned = plan([f"workdir={tmp_path}", "stage=build", "kv=fp8,int8", "tracking=none"], multirun=True)
    assert sweeps._conclude(planned, "built", [0, 4]) == 4
    last = summary.load(tmp_path)
    assert (last.sweep, last.exit_code) == ("judged", 4)
    assert [path.name for path in (tmp_path / "summaries").iterdir()] == ["judged.json"]
