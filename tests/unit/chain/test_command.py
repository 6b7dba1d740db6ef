"""The steps of a chain and their keys, and how a command ends: the report page, the next command, and summary.json."""

import json
import shutil
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from helpers.commands import fake_stages
from helpers.commands.fake_stages import FakeBackend, use_fake_stages
from helpers.commands.jobs import configured, run_job
from helpers.registry.candidates import judged_candidate

from pipeline.chain import command, job, stage_functions
from pipeline.chain.engine_steps import EngineSteps
from pipeline.chain.inputs import check_inputs
from pipeline.chain.job import Run
from pipeline.cli import console
from pipeline.config.compose import plan
from pipeline.config.config import STAGES, PromoteConfig
from pipeline.evidence.reading import USER_INPUTS
from pipeline.registry import summary
from pipeline.store import store as store_module
from pipeline.store.store import Store
from stages.core.artifact import Recipe
from stages.core.digest import tree_files
from stages.core.errors import GateRefusal, MissingRequirement, UserError
from stages.verdict.verdict import Status
from stages.workloads.config import WorkloadsConfig

pytestmark = pytest.mark.usefixtures("no_charts")


def test_every_declared_stage_has_a_function() -> None:
    assert stage_functions.FUNCTIONS.keys() == STAGES.keys()
    assert stage_functions.CHECKS.keys() < STAGES.keys()


@pytest.mark.parametrize("is_file", [True, False])
def test_an_old_report_is_removed_and_never_hides_the_error(
    is_file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use_fake_stages(monkeypatch)
    monkeypatch.setattr(FakeBackend, "load", Mock(side_effect=MissingRequirement("no GPU")))
    page = tmp_path / "report.html"
    page.write_text("yesterday's") if is_file else page.mkdir()
    (config,) = plan([f"workdir={tmp_path}", "calibration.samples=4", "tracking=none", "stage=evaluate"], multirun=False).jobs
    for removed in (is_file, False):
        with pytest.raises(MissingRequirement, match="no GPU"):
            run_job(config)
        assert ("no verdict: report.html was an earlier command's;" in capsys.readouterr().out) == removed
    assert page.exists() == (not is_file)


def test_a_command_without_a_connection_keeps_an_old_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "open_store", Mock(side_effect=MissingRequirement("http://127.0.0.1:9 is not there")))
    (tmp_path / "report.html").write_text("yesterday's")
    (config,) = plan([f"workdir={tmp_path}", "stage=evaluate"], multirun=False).jobs
    with pytest.raises(MissingRequirement, match="is not there"):
        run_job(config)
    assert (tmp_path / "report.html").read_text() == "yesterday's"
    assert summary.load(tmp_path).exit_code == 4


def test_an_unwritable_summary_does_not_hide_the_jobs_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(stage_functions.FUNCTIONS, "evaluate", Mock(side_effect=MissingRequirement("no GPU")))
    full = Mock(side_effect=UserError("summary.json cannot be written"))
    (config,) = plan([f"workdir={tmp_path}", "tracking=none", "stage=evaluate"], multirun=False).jobs
    monkeypatch.setattr(summary, "finish", full)
    monkeypatch.setattr(summary, "note", full)
    with pytest.raises(MissingRequirement, match="no GPU"):
        run_job(config)
    output = capsys.readouterr().err
    assert "the end of the job is not recorded: summary.json cannot be written" in output
    assert "the end of the command is not recorded: summary.json cannot be written" in output


def judging(monkeypatch: pytest.MonkeyPatch, verdict: Status) -> None:
    """Replace the evaluation by one with this verdict."""

    def judge(run: Run) -> None:
        candidate = judged_candidate(run.config.work / "judged", run.label, verdict, metrics={"memory/kib_per_token": 1.0})
        summary.record(run.config.work, run.sweep, candidate)

    for stage in ("evaluate", "all"):
        monkeypatch.setitem(stage_functions.FUNCTIONS, stage, judge)


def test_a_promotion_is_unfinished_until_its_commands_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a promotion is killed, its job stays unfinished, so that stage=promote asks the user to run the command again."""
    promoted = []

    def promote(_: Run, last: summary.Summary) -> None:
        now = summary.load(tmp_path)
        promoted.append((now.unfinished is None, last.unfinished == now.unfinished, now.exit_code))
        raise ModuleNotFoundError("No module named 'psycopg2'", name="psycopg2")

    judging(monkeypatch, "PASS")
    monkeypatch.setattr(job, "open_store", Mock())
    monkeypatch.setattr(stage_functions, "promote_from", promote)
    (config,) = plan([f"workdir={tmp_path}", "stage=all"], multirun=False).jobs
    with pytest.raises(MissingRequirement, match="psycopg2 is not installed here"):
        run_job(config)
    assert promoted == [(False, True, None)]
    last = summary.load(tmp_path)
    assert (last.exit_code, last.exit_codes, last.unfinished) == (4, {1: 4}, None)


def test_an_interrupted_job_is_no_defect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(stage_functions.FUNCTIONS, "evaluate", Mock(side_effect=KeyboardInterrupt))
    (config,) = plan([f"workdir={tmp_path}", "tracking=none", "stage=evaluate"], multirun=False).jobs
    with pytest.raises(KeyboardInterrupt):
        run_job(config)
    assert summary.load(tmp_path).errors == {1: "interrupted"}


def test_the_job_of_a_failed_candidate_has_the_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judging(monkeypatch, "FAIL")
    (config,) = plan([f"workdir={tmp_path}", "tracking=none", "stage=evaluate"], multirun=False).jobs
    with pytest.raises(GateRefusal):
        run_job(config)
    last = summary.load(tmp_path)
    assert (last.exit_code, last.exit_codes) == (3, {1: 3})


@pytest.mark.parametrize("judged", [False, True])
def test_only_a_sweep_with_candidates_ends_with_advice(
    judged: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    judging(monkeypatch, "FAIL")
    judge = stage_functions.FUNCTIONS["evaluate"]

    def evaluate(run: Run) -> None:
        console.say(f"job {run.label}")
        if run.label == "int8":
            raise GateRefusal("FP16 itself answers none")
        if not judged:
            raise MissingRequirement("no GPU")
        judge(run)

    monkeypatch.setitem(stage_functions.FUNCTIONS, "evaluate", evaluate)
    page = tmp_path / "report.html"
    page.write_text("yesterday's")
    overrides = [f"workdir={tmp_path}", "tracking=none", "stage=evaluate", "kv=fp8,int8,int4"]
    code = command.run(plan(overrides, multirun=True), "20260101")
    assert code == summary.load(tmp_path).exit_code == (3 if judged else 4)
    assert f'type="exit code {code}"' in (junit := (tmp_path / "junit.xml").read_text())
    assert "FP16 itself answers none" in junit
    output = capsys.readouterr().out
    assert output.count("Next: ") == output.partition("job int4")[2].count("Next: ") == judged
    assert page.exists() == judged


def test_a_promotion_takes_the_last_sweep_that_has_a_candidate(tmp_path: Path) -> None:
    judged = judged_candidate(tmp_path / "judged", "fp8", metrics={})
    (config,) = plan([f"workdir={tmp_path}", "stage=promote", "tracking=none"], multirun=False).jobs
    summary.record(tmp_path, "1", judged)
    summary.begin(tmp_path, "2", ["int8"])
    summary.finish(tmp_path, "2", 2)
    summary.begin(tmp_path, "3", ["fp8", "int8"])
    assert stage_functions.promotable(config).sweep == "1"
    summary.record(tmp_path, "4", judged.model_copy(update={"model": "other"}))
    assert stage_functions.promotable(config).sweep == "1"
    of_sweep_4 = config.model_copy(update={"promote": PromoteConfig(name=None, sweep="4")})
    with pytest.raises(UserError, match=r"tiny in sweep 4; the last ones are of other: give their model\.path"):
        stage_functions.promotable(of_sweep_4)
    summary.begin(tmp_path, "5", ["fp8", "int8"])
    summary.record(tmp_path, "5", judged)
    with pytest.raises(GateRefusal, match=r"sweep 5 did not finish: .* another sweep with promote.sweep=ID"):
        stage_functions.promotable(config)


def test_an_evaluation_without_tracking_does_not_hide_a_registered_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    judged = judged_candidate(tmp_path / "judged", "fp8", metrics={})
    (config,) = plan([f"workdir={tmp_path}", "stage=promote"], multirun=False).jobs
    for sweep, version in (("1", "1"), ("2", "")):
        summary.begin(tmp_path, sweep, ["fp8"])
        summary.record(tmp_path, sweep, judged.model_copy(update={"version": version}))
        summary.finish(tmp_path, sweep, 0)
        assert stage_functions.promotable(config).sweep == "1"
    assert "the last command registered no candidate of tiny; promoting from sweep 1" in capsys.readouterr().err
    assert stage_functions.promotable(config.model_copy(update={"promote": PromoteConfig(name=None, sweep="2")})).sweep == "2"


def test_an_artifact_is_verified_once_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = Mock(wraps=tree_files)
    recipe = Recipe("demo", {}, {})
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
    recipe = Recipe("demo", {}, {"jsonl": chain.digest_of(link)})
    message = "link: was changed while this command read it; run the command again"
    with pytest.raises(UserError, match=message):
        chain.make(recipe, lambda *_: change(link))
    assert not chain.store.path(recipe).exists()


def test_default_threads_are_the_physical_cores_and_in_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.cpu_count", lambda logical: None if logical else 6)
    parts = {}
    for overrides in ([], ["backend.threads=6"], ["backend.threads=2"]):
        config = configured(tmp_path, *overrides)
        recipe = Run(config).verdict_steps.recipe("baseline", {})
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
        keys.add(Run(config).verdict_steps.recipe("round", {}).key)
    assert len(keys) == 2


def test_the_folder_of_the_users_texts_has_no_name_in_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of the folder `.` is empty. A recorded empty name would be refused when a replay validates the configuration."""
    recipes = []
    for folder, path in (("a", "."), ("b", tmp_path / "b")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "text.md").write_text("many words")
        monkeypatch.chdir(tmp_path / folder)
        config = configured(tmp_path, "workloads.lengths=[1024]", f"workloads.documents={path}")
        recipes.append(Run(config).verdict_steps.recipe("round", {}))
        WorkloadsConfig.model_validate_json(json.dumps(recipes[-1].config["workloads"]))
    assert recipes[0].key == recipes[1].key


def test_the_files_of_a_draft_are_part_of_an_evaluations_key(tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    shutil.copytree(import_module("stages.tiny").__path__[0] + "/checkpoint", draft)
    config = configured(tmp_path, f"workloads.speculation={{draft:{draft}}}")
    check_inputs(config)
    before = Run(config).verdict_steps.recipe("round", {})
    (draft / "generation_config.json").write_text("{}")
    after = Run(config).verdict_steps.recipe("round", {})
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
    monkeypatch.setitem(stage_functions.FUNCTIONS, "build", Mock(side_effect=MissingRequirement("no compiler")))
    summary.begin(tmp_path, "judged", ["fp8"])
    summary.note(tmp_path, "judged", exit_code=0)
    planned = plan([f"workdir={tmp_path}", "stage=build", "kv=fp8,int8", "tracking=none"], multirun=True)
    assert command.run(planned, "built") == 4
    last = summary.load(tmp_path)
    assert (last.sweep, last.exit_code) == ("judged", 0)
    assert [path.name for path in (tmp_path / "summaries").iterdir()] == ["judged.json"]
