"""The steps of a chain: artifacts are verified once, inputs must not change meanwhile, and keys have all their parts."""

import json
import shutil
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from helpers.commands import fake_stages
from helpers.commands.fake_stages import use_fake_stages
from helpers.commands.jobs import configured

from pipeline.chain import actions, runner
from pipeline.chain.engine_steps import EngineSteps
from pipeline.chain.inputs import check_inputs
from pipeline.chain.job_run import Run
from pipeline.config.compose import plan
from pipeline.evidence.reading import USER_INPUTS
from pipeline.registry import summary
from pipeline.store import store as store_module
from pipeline.store.store import Store
from stages.core.artifact import Recipe
from stages.core.digest import tree_files
from stages.core.errors import MissingRequirement, UserError
from stages.workloads.config import WorkloadsConfig


def test_an_artifact_is_verified_once_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = Mock(wraps=tree_files)
    recipe = Recipe("demo", ("stages.policies.policy",), {}, {})
    store = Store(tmp_path)
    store.make(recipe, lambda _: None)
    monkeypatch.setattr(store_module, "tree_files", hashed)
    config: Any = None  # `make` does not use the configuration
    chain = EngineSteps(config, store)
    first = chain.make(recipe, lambda *_: None)
    assert chain.make(recipe, lambda *_: None) is first
    assert hashed.call_count == 1
    assert len(chain.finished) == 1


def swap(link: Path) -> None:
    link.with_name("other").write_text("2")
    link.unlink()
    link.symlink_to("other")


@pytest.mark.parametrize("change", [swap, Path.unlink, lambda path: path.resolve().write_text("two")])
def test_nothing_is_made_of_a_file_that_was_changed_meanwhile(change: Callable[[Path], object], tmp_path: Path) -> None:
    config: Any = None  # `make` does not use the configuration
    chain, link = EngineSteps(config, Store(tmp_path / "store")), tmp_path / "link"
    (tmp_path / "one").write_text("1")
    link.symlink_to("one")
    recipe = Recipe("demo", ("stages.policies.policy",), {}, {"jsonl": chain.digest_of(link)})
    message = "link: was changed while this command read it; run the command again"
    with pytest.raises(UserError, match=message):
        chain.make(recipe, lambda *_: change(link))
    assert not chain.store.path(recipe).exists()


def test_default_threads_are_the_physical_cores_and_in_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.cpu_count", lambda logical: None if logical else 6)
    parts = {}
    for overrides in ([], ["backend.threads=6"], ["backend.threads=2"]):
        config = configured(tmp_path, *overrides)
        recipe = Run(config).verdict_steps.recipe("baseline", "measure", {})
        parts[config.backend.model_dump()["threads"], bool(overrides)] = recipe.key
    assert set(parts) == {(6, False), (6, True), (2, True)}
    assert parts[6, False] == parts[6, True] != parts[2, True]


def test_the_same_questions_in_another_folder_are_not_asked_again(tmp_path: Path) -> None:
    keys = set[str]()
    for folder, text in (("a", "one"), ("b", "one"), ("c", "another")):
        file = tmp_path / folder / "questions.jsonl"
        file.parent.mkdir()
        file.write_text(text)
        config = configured(tmp_path, "workloads=jsonl", f"workloads.jsonl={file}")
        keys.add(Run(config).verdict_steps.recipe("round", "measure", {}).key)
    assert len(keys) == 2


def test_the_folder_of_the_users_texts_has_no_name_in_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of the folder `.` is empty. A recorded empty name would be refused when a replay validates the configuration."""
    recipes = []
    for folder, path in (("a", "."), ("b", tmp_path / "b")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "text.md").write_text("many words")
        monkeypatch.chdir(tmp_path / folder)
        config = configured(tmp_path, "workloads.lengths=[1024]", f"workloads.documents={path}")
        recipes.append(Run(config).verdict_steps.recipe("round", "measure", {}))
        WorkloadsConfig.model_validate_json(json.dumps(recipes[-1].config["workloads"]))
    assert recipes[0].key == recipes[1].key


def test_the_files_of_a_draft_are_part_of_an_evaluations_key(tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    shutil.copytree(import_module("stages.tiny").__path__[0] + "/checkpoint", draft)
    config = configured(tmp_path, f"workloads.speculation={{draft:{draft}}}")
    check_inputs(config)
    before = Run(config).verdict_steps.recipe("round", "measure", {})
    (draft / "generation_config.json").write_text("{}")
    after = Run(config).verdict_steps.recipe("round", "measure", {})
    assert before.key != after.key
    assert before.inputs["draft"] != after.inputs["draft"]
    assert "draft" in USER_INPUTS


@pytest.mark.parametrize("compared", [0, 1])
def test_without_compared_requests_no_reference_engine_is_built(
    compared: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_fake_stages(monkeypatch)
    steps = Run(configured(tmp_path, "kv=int8", f"workloads.conformance_samples={compared}")).verdict_steps
    steps.report()
    titles = [title for title, _ in steps.chain.finished]
    assert ("build int8 as torch" in titles) is (compared > 0)


@pytest.mark.parametrize(("kv", "serves"), [("fp8", True), ("int8", True), ("int4_tensor", False)])
def test_only_an_engine_that_fails_the_first_round_gets_no_stress_test(
    kv: str, serves: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, measured = list[bool](), fake_stages.measure_once()

    def measure_once(serves: bool) -> Any:
        asked.append(serves)
        return measured

    monkeypatch.setattr(fake_stages, "measure_once", measure_once)
    use_fake_stages(monkeypatch)
    Run(configured(tmp_path, f"kv={kv}")).verdict_steps.report()
    assert asked == [True, serves]


def test_a_sweep_that_judges_nothing_changes_no_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(_: Run) -> None:
        raise MissingRequirement("no compiler")

    monkeypatch.setitem(actions.ACTIONS, "build", build)
    summary.begin(tmp_path, "judged", ["fp8"])
    summary.note(tmp_path, "judged", exit_code=0)
    planned = plan([f"workdir={tmp_path}", "stage=build", "kv=fp8,int8", "tracking=none"], multirun=True)
    assert runner.run(planned, "built") == 4
    last = summary.load(tmp_path)
    assert (last.sweep, last.exit_code) == ("judged", 0)
    assert [path.name for path in (tmp_path / "summaries").iterdir()] == ["judged.json"]
