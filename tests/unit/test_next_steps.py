"""Every ending names the next command, and that command is one: it composes as it is printed."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from judged_candidates import judged_candidate
from judged_engine import config_of

from pipeline.config.compose import plan
from pipeline.config.config import Config
from pipeline.registry.promotion import Move
from pipeline.registry.summary import Candidate, Registration
from pipeline.terminal import next_steps
from pipeline.terminal.next_steps import Step
from pipeline.verdict.thresholds import Check, Status

TYPED = [
    "model.path=/models/Some Llm",
    "workdir='a dir/it\\'s'",
    "gates.margin=0.1",
    "+gates.margins.copy=0.2",
    "tracking.experiment='other one'",
    "backend.threads=1",
]
"""As a shell hands it on."""


def composed(steps: Sequence[Step]) -> list[Config]:
    """The first job of each command of ours, composed from what a shell makes of the printed line."""
    found = []
    for step in steps:
        if step.command is None or "-m pipeline" not in step.command:
            continue
        words = shlex.split(step.command)
        assert Path(words[0]).name.startswith("python")
        assert words[1:3] == ["-m", "pipeline"]
        arguments = words[3:]
        if "--config-dir" in arguments:
            place = arguments.index("--config-dir")
            arguments[place : place + 2] = [f"hydra.searchpath=[file://{arguments[place + 1]}]"]
        planned = plan([one for one in arguments if one != "-m"], "-m" in arguments)
        assert planned.sweeping == ("-m" in arguments or any(one.startswith("experiment=") for one in arguments))
        found.append(planned.jobs[0])
    return found


def candidate(
    folder: Path, name: str, verdict: Status, needed: dict[str, int] | None = None, gate: str = "accuracy"
) -> Candidate:
    judged = judged_candidate(folder, name.partition(" ")[0], verdict, metrics={})
    check = Check(gate=gate, where="copy", value=0.0, bound=0.0, threshold=0.0, status=verdict, reason="mean KL")
    return judged.model_copy(update={"name": name, "samples_needed": needed or {}, "checks": (check,)})


def kept(config: Config) -> None:
    """What was typed of model, work directory, tracking and gates arrives in the next command."""
    assert config.model.path == "/models/Some Llm"
    assert config.workdir == "a dir/it's"
    assert config.tracking.experiment == "other one"
    assert (config.gates.margin, config.gates.margins) == (0.1, {"copy": 0.2})
    assert getattr(config.backend, "threads", None) == 1


def test_a_sweep_with_a_pass_names_promote_with_its_gates(tmp_path: Path) -> None:
    config = plan([*TYPED, "kv=fp8,int4"], multirun=True).jobs[0]
    judged = [candidate(tmp_path, "fp8", "PASS"), candidate(tmp_path, "int4", "FAIL")]
    (next_one,) = composed(next_steps.after_judging(config, judged, [*TYPED, "kv=fp8,int4"], swept=["kv"]))
    assert next_one.stage == "promote"
    kept(next_one)


def test_after_an_experiment_the_promotion_finds_what_the_experiment_made(tmp_path: Path) -> None:
    config = plan(["experiment=smollm2"], multirun=True).jobs[0]
    (next_one,) = composed(
        next_steps.after_judging(config, [candidate(tmp_path, "fp8", "PASS")], ["experiment=smollm2"], swept=["kv"])
    )
    assert (next_one.stage, next_one.work, next_one.model) == ("promote", config.work, config.model)


def test_a_sweep_that_did_not_finish_is_finished_before_anything_is_promoted(tmp_path: Path) -> None:
    base = [*TYPED, "kv=fp8,int4"]
    config, judged = plan(base, multirun=True).jobs[0], [candidate(tmp_path, "fp8", "PASS")]
    steps = next_steps.after_judging(config, judged, base, swept=["kv"], unfinished=True)
    assert [job.stage for job in composed(steps)] == ["all"]


def test_a_recommended_candidate_is_promoted_by_its_name(tmp_path: Path) -> None:
    registered = candidate(tmp_path, "fp8 kv.sink_tokens=4", "PASS").model_copy(
        update={"registration": Registration(run_id="run", model_version="1")}
    )
    (next_one,) = composed(next_steps.after_recommendation(config_of(*TYPED), [registered], registered.name))
    assert (next_one.stage, next_one.promote.name) == ("promote", "fp8 kv.sink_tokens=4")
    (other,) = composed(next_steps.after_recommendation(config_of(*TYPED), [], "fp8"))
    assert other.stage == "status"


def test_without_tracking_a_pass_is_registered_first(tmp_path: Path) -> None:
    base = [*TYPED, "tracking=none"]
    steps = next_steps.after_judging(config_of(*base), [candidate(tmp_path, "fp8", "PASS")], base)
    (next_one,) = composed(steps)
    assert (next_one.stage, next_one.tracking.enabled) == ("evaluate", True)


def test_an_inconclusive_one_says_how_many_samples_to_ask(tmp_path: Path) -> None:
    config = config_of(*TYPED, "kv=int8")
    judged = candidate(tmp_path, "int8", "INCONCLUSIVE", {"copy": 700, "retrieval": 300})
    (next_one,) = composed(next_steps.after_judging(config, [judged], [*TYPED, "kv=int8"]))
    kept(next_one)
    assert (next_one.kv.name, next_one.gates.attempt) == ("int8", 2)
    assert (next_one.workloads.samples["copy"], next_one.workloads.samples["retrieval"]) == (700, 300)
    assert next_one.workloads.samples["tool_call"] == config.workloads.samples["tool_call"]


def test_the_inconclusive_ones_of_a_sweep_are_judged_again_together(tmp_path: Path) -> None:
    base = [*TYPED, "kv=fp8,int8,int4"]
    config = plan(base, multirun=True).jobs[0]
    judged = [
        candidate(tmp_path, "fp8", "INCONCLUSIVE", {"copy": 700}),
        candidate(tmp_path, "int8", "INCONCLUSIVE", {"copy": 900}),
        candidate(tmp_path, "int4", "FAIL"),
    ]
    steps = next_steps.after_judging(config, judged, base, swept=["kv"])
    assert any("-m" in shlex.split(step.command)[3:] and "kv=fp8,int8" in step.command for step in steps if step.command)
    assert composed(steps)[0].workloads.samples["copy"] == 900


@pytest.mark.parametrize(
    ("base", "needed", "gate", "says"),
    [
        (["workloads=bfcl"], {"bfcl_multiple": 500}, "accuracy", "workloads.bfcl.samples=500"),
        (["workloads=jsonl", "workloads.jsonl=mine.jsonl"], {"custom": 500}, "accuracy", "500 of custom"),
        (["workloads.samples.copy=4"], {"all": 32}, "min_samples", "workloads.samples.copy=32"),
        ([], {}, "max_mean_kl", "workloads.samples.copy=619"),
        ([], {"copy": 700}, "max_mean_kl", "workloads.samples.retrieval=619"),
        (["gates.attempt=2"], {}, "max_ruined_share", "workloads.samples.copy=358"),
        ([], {}, "min_baseline_accuracy", "more samples would not decide"),
        ([], {"copy": 1_000_000}, "accuracy", "no number of samples decides it"),
    ],
)
def test_what_to_change_depends_on_what_is_open(
    tmp_path: Path, base: list[str], needed: dict[str, int], gate: str, says: str
) -> None:
    judged = candidate(tmp_path, "fp8", "INCONCLUSIVE", needed, gate)
    steps = next_steps.after_judging(config_of(*base), [judged], base)
    assert says in " ".join(f"{step.why} {step.command}" for step in steps)
    composed(steps)


@pytest.mark.parametrize(
    ("base", "finer"),
    [
        (["kv=int4_tensor"], "int4_g32"),
        (["kv=int4_g32", "kv.sink_tokens=4"], "fp8k_int4v"),
        (["kv=fp8"], "int8"),
        (["kv=fp8", "experiment=demo"], "int8"),
    ],
)
def test_after_a_fail_the_next_finer_policy_is_named_and_where_to_look(tmp_path: Path, base: list[str], finer: str) -> None:
    config = plan(base, multirun=True).jobs[0]
    judged = candidate(tmp_path, config.kv.name, "FAIL")
    steps = next_steps.after_judging(config, [judged], base)
    assert str(judged.report.path) in steps[0].why
    (next_one,) = composed(steps)
    assert (next_one.kv.name, next_one.kv.sink_tokens) == (finer, 0)


def test_where_nothing_finer_is_left_the_search_is_named(tmp_path: Path) -> None:
    (next_one,) = composed(next_steps.after_judging(config_of(*TYPED, "kv=int8"), [candidate(tmp_path, "int8", "FAIL")], TYPED))
    assert next_one.stage == "tune"


def test_a_promotion_says_how_to_verify_fetch_and_take_back(tmp_path: Path) -> None:
    config = config_of(*TYPED, "stage=promote")
    steps = next_steps.after_promotion(config, Move("fp8", "3", "2", True, ""), tmp_path / "an engine")
    verify, back = composed(steps)
    assert (verify.stage, verify.bundle) == ("verify", str(tmp_path / "an engine"))
    assert back.stage == "rollback"
    kept_work = (back.workdir, back.model.path, back.tracking.experiment)
    assert kept_work == ("a dir/it's", "/models/Some Llm", "other one")
    (fetch,) = [step.command for step in steps if step.command is not None and "mlflow artifacts" in step.command]
    assert "models:/kvgate-Some_Llm@champion" in fetch
    only = next_steps.after_promotion(config, Move("fp8", "3", None, True, ""), tmp_path)
    assert [job.stage for job in composed(only)] == ["verify"], "nothing to take back to"


def test_a_refused_promotion_says_what_serves_and_what_else_to_judge(tmp_path: Path) -> None:
    config = config_of(*TYPED, "stage=promote")
    judged = [candidate(tmp_path, "int4", "FAIL"), candidate(tmp_path, "fp8", "FAIL")]
    status, finer = composed(next_steps.after_no_promotion(config, judged))
    assert (status.stage, finer.stage, finer.kv.name) == ("status", "evaluate", "int8")
    kept_keys = (finer.model.path, finer.gates.margin, finer.tracking.experiment)
    assert kept_keys == ("/models/Some Llm", 0.1, "other one")
    passed = [candidate(tmp_path, "fp8", "PASS")]
    assert [job.stage for job in composed(next_steps.after_no_promotion(config, passed))] == ["status"]


def test_an_engine_that_was_verified_is_loaded_by_a_line_that_python_takes(tmp_path: Path) -> None:
    bundle = tmp_path / "it's an engine"
    config = config_of("stage=verify", "bundle=a").model_copy(update={"bundle": str(bundle)})
    (step,) = next_steps.after_verify(config, built=True)
    assert step.command is not None
    _, option, program = shlex.split(step.command)
    assert option == "-c"
    assert repr(str(bundle)) in program
    compile(program, "load", "exec")
    assert next_steps.after_verify(config, built=False)[0].command is None


def test_an_engine_that_differs_is_not_to_be_served(tmp_path: Path) -> None:
    config = config_of(*TYPED, "stage=verify", f"bundle={tmp_path}")
    told, _ = next_steps.after_difference(config, differs=True)
    assert "do not serve it" in told.why
    told, _ = next_steps.after_difference(config, differs=False)
    assert "bring what is missing" in told.why


@pytest.mark.parametrize(
    ("on_path", "begins"), [("same", "python -m pipeline"), ("other", "{own} -m pipeline"), ("none", "{own} -m pipeline")]
)
def test_a_command_begins_with_the_python_that_has_kvgate(
    on_path: str, begins: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own env" / "bin"
    for folder in (own, tmp_path / "other"):
        folder.mkdir(parents=True)
        (folder / "python").write_text("")
        (folder / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(own / "python"))
    monkeypatch.setenv("PATH", str({"same": own, "other": tmp_path / "other", "none": tmp_path / "nowhere"}[on_path]))
    (step,) = next_steps.after_quantize(["kv=fp8"])
    assert step.command == f"{begins.format(own=shlex.quote(str(own / 'python')))} kv=fp8 stage=build"


def test_every_other_ending_names_a_command_that_composes(tmp_path: Path) -> None:
    base = [*TYPED, "kv=fp8"]
    config = config_of(*base)
    assert [job.stage for job in composed(next_steps.after_quantize(base))] == ["build"]
    assert [job.stage for job in composed(next_steps.after_quantize(["kv=fp8,int8"], sweep=True))] == ["build"]
    assert [job.stage for job in composed(next_steps.after_no_recommendation(base))] == ["recommend"]
    assert [job.stage for job in composed(next_steps.after_build(base))] == ["evaluate"]
    assert [job.stage for job in composed(next_steps.after_capacity(base))] == ["recommend"]
    assert [job.stage for job in composed(next_steps.after_rollback(config))] == ["status"]
    assert [job.stage for job in composed(next_steps.after_route(config, ["copy"]))] == ["route", "status"]
    pruning = config_of(*base, "stage=prune", "prune.keep_sweeps=7")
    (apply,) = composed(next_steps.after_prune(pruning, would_free=True))
    assert (apply.stage, apply.prune.apply, apply.prune.keep_sweeps) == ("prune", True, 7)
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv" / "found.yaml").write_text((Path(__file__).parents[2] / "conf/kv/fp8.yaml").read_text())
    (judging,) = composed(next_steps.after_tuning(config, "found", tmp_path))
    assert judging.stage == "evaluate"
    steps = next_steps.after_status(config, judged=False, promotable=True, champion=tmp_path, prunable=True)
    assert [job.stage for job in composed(steps)] == ["all", "promote", "verify", "prune"]
