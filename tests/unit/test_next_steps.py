"""Every ending names the next command, and that command is one: it composes as it is printed."""

import shlex
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
        assert words[:3] == ["python", "-m", "pipeline"]
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
        ([], {}, "max_mean_kl", "workloads.samples.copy=320"),
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


def test_every_other_ending_names_a_command_that_composes(tmp_path: Path) -> None:
    base = [*TYPED, "kv=fp8"]
    config = config_of(*base)
    assert [job.stage for job in composed(next_steps.after_quantize(base))] == ["build"]
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
