"""Every command prints a next command when it ends. The printed command must compose, and its inputs must exist."""

import json
import math
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.registry.candidates import judged_candidate
from helpers.registry.judged_engine import config_of

from pipeline.__main__ import _plan_command
from pipeline.chain.inputs import checks
from pipeline.cli import console, next_steps
from pipeline.cli.next_steps import NextStep
from pipeline.config.compose import plan
from pipeline.config.config import Config
from pipeline.config.stages import STAGES
from stages.core.errors import CannotBeJudged
from stages.verdict.candidate import Candidate
from stages.verdict.thresholds import Check, Gate, Status

TINY = str(Path(__file__).parents[3] / "stages" / "tiny" / "checkpoint")
TYPED = [
    f"model.path={TINY}",
    "workdir='a dir/it\\'s'",
    "gates.max_mean_kl=0.2",
    "tracking.experiment='other one'",
    "backend.threads=1",
]
"""Overrides as the shell passes them."""
OPENED = set[Path]()
"""Checkpoints whose tokenizer an earlier test opened."""


def after(stage: str, base: list[str], *, sweep: bool = False) -> NextStep:
    step = next_steps.after_stage(STAGES[stage], base, sweep=sweep)
    assert step is not None
    return step


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Create the inputs that the commands refer to in the current directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "an engine").mkdir()
    kinds = ("custom", "other")
    questions = [{"prompt": f"{name} {n}:", "reference": "4711", "workload": name} for n in range(2) for name in kinds]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(one) + "\n" for one in questions))


def composed(step: NextStep | None) -> Config:
    """Parse and compose a printed kvgate command; return its first job. Asserts that all jobs find their inputs."""
    assert step is not None
    assert step.command is not None, step.why
    words = shlex.split(step.command)
    assert Path(words[0]).name.startswith("python")
    assert words[1:3] == ["-m", "pipeline"]
    arguments = words[3:]
    folders = [one.removeprefix("--config-dir=") for one in arguments if one.startswith("--config-dir=")]
    planned = plan([one for one in arguments if not one.startswith("-")], "-m" in arguments, folders)
    sweeps = {one for one in arguments if one.startswith("experiment=")} - {"experiment=quick"}
    assert planned.sweeping == ("-m" in arguments or bool(sweeps))
    for check in (check for job in planned.jobs for check in checks(job, OPENED)):
        check()
    return planned.jobs[0]


def executable(path: Path, content: str) -> None:
    path.parent.mkdir(parents=True)
    path.write_text(content)
    path.chmod(0o755)


def candidate(
    folder: Path, name: str, verdict: Status, needed: dict[str, int] | None = None, gate: Gate = Gate.ACCURACY
) -> Candidate:
    judged = judged_candidate(folder, name.partition(" ")[0], verdict, metrics={})
    where, bound = next(iter(needed or ["copy"])), None if gate == Gate.NOISE_FLOOR else 0.0
    check = Check(gate=gate, where=where, value=0.0, bound=bound, threshold=0.0, status=verdict, reason="mean KL")
    return judged.model_copy(update={"name": name, "samples_needed": needed or {}, "checks": (check,)})


@pytest.mark.parametrize(
    ("base", "verdicts", "unfinished", "stage", "kv"),
    [
        (["kv=fp8,int4"], {"fp8": "PASS", "int4": "FAIL"}, False, "promote", None),
        (["kv=fp8,int4"], {"fp8": "PASS"}, True, "all", "fp8"),  # nothing of an unfinished sweep is promoted
        (["kv=fp8,int8"], {"fp8": "INCONCLUSIVE", "int8": "FAIL"}, False, "all", "fp8"),
        (["kv=fp8", "tracking=none"], {"fp8": "PASS"}, False, "evaluate", "fp8"),  # it must be registered first
        (["kv=int4_tensor"], {"int4_tensor": "FAIL"}, False, "all", "int4_g32"),  # the next finer policy
        (["kv=int4_g32", "kv.sink_tokens=4"], {"int4_g32": "FAIL"}, False, "all", "fp8k_int4v"),
    ],
)
def test_the_next_command_repeats_the_users_arguments(
    base: list[str], verdicts: dict[str, Status], unfinished: bool, stage: str, kv: str | None, tmp_path: Path
) -> None:
    sweeping = "," in base[0]
    judged = [candidate(tmp_path, name, verdict, {"copy": 700}) for name, verdict in verdicts.items()]
    config = plan([*TYPED, *base], multirun=sweeping).jobs[0]
    step = next_steps.after_judging(config, judged, [*TYPED, *base], swept=["kv"] if sweeping else [], unfinished=unfinished)
    after = composed(step)
    assert (after.stage, after.model.path, after.workdir) == (stage, TINY, "a dir/it's")
    assert kv is None or (after.kv.name, after.kv.sink_tokens) == (kv, 0)
    assert after.tracking.enabled
    assert "tracking=none" in base or after.tracking.experiment == "other one"
    assert stage == "promote" or after.gates.max_mean_kl == 0.2


QUICK = ["experiment=quick", "workloads.conformance_samples=0"]


@pytest.mark.parametrize(
    ("look", "verdict", "kv", "quick"),
    [
        (QUICK, "INCONCLUSIVE", "fp8", False),
        (QUICK, "FAIL", "int8", True),
        (["++workloads.conformance_samples=0"], "INCONCLUSIVE", "fp8", False),
        (["experiment='quick'"], "INCONCLUSIVE", "fp8", False),
    ],
)
def test_after_a_quick_check_comes_a_verdict_or_a_finer_policy(
    look: list[str], verdict: Status, kv: str, quick: bool, tmp_path: Path
) -> None:
    base = [*TYPED, *look, "kv=fp8"]
    after = composed(next_steps.after_judging(config_of(*base), [candidate(tmp_path, "fp8", verdict)], base))
    assert (after.kv.name, after.workloads.is_quick_check) == (kv, quick)
    assert look != QUICK or after.tracking.enabled != quick


def test_the_key_of_a_signed_evaluation_is_not_repeated_for_stages_that_refuse_it(tmp_path: Path) -> None:
    (tmp_path / "key.pub").write_text("")
    base = ["kv=int8", "signing.key=key.pem", "signing.trusted=[key.pub]"]
    step = next_steps.after_judging(config_of(*base), [candidate(tmp_path, "int8", "PASS")], base)
    assert step.command is not None
    arguments = shlex.split(step.command)[3:]
    assert "stage=promote" in arguments
    assert ("signing.trusted=[key.pub]" in arguments, "signing.key=key.pem" in arguments) == (True, False)


def test_a_promotion_finds_the_experiments_engines(tmp_path: Path) -> None:
    config = plan(["experiment=smollm2"], multirun=True).jobs[0]
    judged = [candidate(tmp_path, "fp8", "PASS")]
    after = composed(next_steps.after_judging(config, judged, ["experiment=smollm2"], swept=["kv"]))
    assert (after.stage, after.work, after.model) == ("promote", config.work, config.model)


def test_the_command_that_promotes_names_the_python_that_serves(tmp_path: Path) -> None:
    base = [*TYPED, "kv=fp8", "backend=vllm", "backend.python=/opt/vllm/bin/python"]
    config = config_of(*[one for one in base if not one.startswith("backend.threads")])
    step = next_steps.after_judging(config, [candidate(tmp_path, "fp8", "PASS")], base)
    assert "stage=promote backend=vllm backend.python=/opt/vllm/bin/python" in str(step.command)


@pytest.mark.parametrize(
    ("base", "needed", "gate", "says"),
    [
        (["workloads=gsm8k", "workloads.gsm8k=60"], {"gsm8k": 5000}, Gate.ACCURACY, "workloads.gsm8k=1319"),
        (["workloads=gsm8k", "workloads.gsm8k=60"], {}, Gate.MEAN_KL, "workloads.gsm8k=232"),
        (["workloads=gsm8k", "workloads.gsm8k=1319"], {}, Gate.MEAN_KL, "more questions would not decide: mean KL"),
        (["workloads=jsonl", "workloads.jsonl=mine.jsonl"], {"custom": 500}, Gate.ACCURACY, "add questions to mine.jsonl; ask"),
        (["workloads=jsonl", "workloads.jsonl=mine.jsonl"], {"gsm8k": 500}, Gate.ACCURACY, "add questions to mine.jsonl; ask"),
        (["workloads=jsonl", "workloads.jsonl=mine.jsonl"], {"all": 15}, Gate.MIN_SAMPLES, "add questions to mine.jsonl; ask"),
        (["workloads.samples.copy=4"], {"all": 32}, Gate.MIN_SAMPLES, "workloads.samples.copy=32"),
        ([], {}, Gate.MEAN_KL, "workloads.samples.copy=619"),
        (["gates.attempt=2"], {}, Gate.RUINED, "workloads.samples.copy=358"),
        ([], {}, Gate.NOISE_FLOOR, "more questions would not decide: mean KL"),
        (["workloads=jsonl", "workloads.jsonl=mine.jsonl"], {}, Gate.RECOVERY, "more questions would not decide: mean KL"),
        (["workloads.lengths=[1024,2048]"], {"long_1024": 210}, Gate.RECOVERY, "workloads.length_documents=30"),
        (["workloads.lengths=[1024]"], {}, Gate.MEAN_KL, "workloads.length_documents=58 gates.attempt=2"),
        (
            ["gates.attempt=20"],
            {"copy": 700},
            Gate.RECOVERY,
            "fp8: undecided: recovery; no further attempt",
        ),
        # A class that passed with all its samples passes at the next attempt's smaller level with this many.
        ([], {"copy": 700}, Gate.RECOVERY, f"samples.tool_call={math.ceil(160 * math.log(0.0025) / math.log(0.045))}"),
        (["workloads.samples.copy=60000"], {}, Gate.MEAN_KL, "judge int8, which keeps more"),  # twice are refused
        ([], {"copy": 1_000_000}, Gate.ACCURACY, "judge int8, which keeps more"),  # no number of samples decides it
    ],
)
def test_the_suggested_change_depends_on_the_undecided_gates(
    tmp_path: Path, base: list[str], needed: dict[str, int], gate: Gate, says: str
) -> None:
    judged = candidate(tmp_path, "fp8", "INCONCLUSIVE", needed, gate)
    step = next_steps.after_judging(config_of(*base), [judged], base)
    assert says in f"{step.why} {step.command}"
    if step.command is not None:
        composed(step)


@pytest.mark.parametrize(
    ("base", "weak", "able", "says"),
    [
        ([], ["copy"], ["tool_call"], "workloads.samples.copy=0"),
        ([], ["copy", "retrieval"], [], "ask questions that this model answers: workloads=chat calibration=chat"),
        (["workloads=jsonl", "workloads.jsonl=mine.jsonl"], ["custom"], ["other"], "ask questions that this model answers"),
        (["workloads.lengths=[1024,2048]"], ["long_2048"], ["long_1024"], "judge it at the lengths where the model itself"),
    ],
)
def test_workloads_that_the_baseline_fails_are_replaced(base: list[str], weak: list[str], able: list[str], says: str) -> None:
    step = next_steps.after_error(config_of(*base), CannotBeJudged("", weak, able), base)
    assert step is not None
    assert says in f"{step.why} {step.command}"
    if step.command is not None:
        after = composed(step).workloads
        assert not any(after.samples.get(name) for name in weak)  # type: ignore[call-overload]
        assert not {f"long_{length}" for length in after.lengths} & {*weak}


@pytest.mark.parametrize("verdict", ["FAIL", "INCONCLUSIVE"])
def test_no_policy_is_advised_if_the_must_fail_control_passed(tmp_path: Path, verdict: Status) -> None:
    judged = candidate(tmp_path, "fp8", verdict)
    unseen = Check(
        gate=Gate.MUST_FAIL_CONTROL, where="control", value=0.0, threshold=1.0, status="FAIL", reason="no gate noticed"
    )
    step = next_steps.after_judging(config_of(), [judged.model_copy(update={"checks": (*judged.checks, unseen)})], [])
    assert step.command is None
    assert "a corrupted cache gave the same results" in step.why


@pytest.mark.parametrize(("on_path", "plain"), [("same", True), ("other", False), ("none", False)])
def test_a_command_begins_with_the_python_that_has_kvgate(
    on_path: str, plain: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own env" / "bin"
    for folder in (own, tmp_path / "other"):
        executable(folder / "python", "")
    monkeypatch.setattr(sys, "executable", str(own / "python"))
    monkeypatch.setenv("PATH", str({"same": own, "other": tmp_path / "other", "none": tmp_path / "nowhere"}[on_path]))
    begins = "python" if plain else shlex.quote(str(own / "python"))
    assert after("quantize", ["kv=fp8"]).command == f"{begins} -m pipeline kv=fp8 stage=build"


@pytest.mark.parametrize("on_path", [True, False])
def test_a_command_and_an_error_begin_with_the_script_that_the_user_ran(
    on_path: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "own env" / "kvgate"
    executable(script, "")
    monkeypatch.setattr(sys, "argv", [str(script), "kv=fp8"])
    monkeypatch.setenv("PATH", str(script.parent if on_path else tmp_path))
    begins = "kvgate" if on_path else shlex.quote(str(script))
    assert after("quantize", ["kv=fp8"]).command == f"{begins} kv=fp8 stage=build"
    console.error("kv=fp9: no such option")
    assert capsys.readouterr().err == "kvgate: error: kv=fp9: no such option\n"


@pytest.mark.parametrize(
    ("file", "command"),
    [
        ("engine_args.yaml", "vllm serve '{0}/checkpoint' --config '{0}/engine_args.yaml'"),
        ("llm_args.yaml", "trtllm-serve '{0}/checkpoint' --config '{0}/llm_args.yaml'"),
        ("engine/config.json", "trtllm-serve '{0}/engine' --tokenizer '{0}' --backend tensorrt"),
        ("launch.txt", "(cd '{0}' && sh launch.txt)"),
        ("decoder.onnx", "pipeline.api.load('{0}')"),
    ],
)
def test_serving_advice_equals_the_bundles_command(file: str, command: str, tmp_path: Path) -> None:
    engine = tmp_path / "engine of mine"
    (engine / file).parent.mkdir(parents=True)
    (engine / file).write_text("")
    assert shlex.split(next_steps.serving(engine)) == shlex.split(command.format(engine))


@pytest.mark.parametrize(("given", "place"), [("env/bin/python", "env/bin"), ("python", "other")])
@pytest.mark.parametrize(("file", "program"), [("engine_args.yaml", "vllm"), ("launch.txt", "python")])
def test_an_engine_is_served_by_the_environment_that_judged_it(
    file: str, program: str, given: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tmp_path / "an engine"
    (engine / file).write_text(program)
    for folder in ("env/bin", "other"):
        executable(tmp_path / folder / program, '#!/bin/sh\necho "$0"\n')
    monkeypatch.setenv("PATH", f"{tmp_path / 'other'}:{os.environ['PATH']}")
    backend = config_of("backend=vllm", f"backend.python={given}").backend
    ran = subprocess.run(next_steps.serving(engine, backend), shell=True, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == str(tmp_path / place / program)


def test_the_call_that_loads_the_champion_finds_its_store() -> None:
    call = next_steps.champion_call
    assert call(config_of(), "kvgate-m") == "pipeline.api.champion('kvgate-m')"
    given = ["workdir=there", "tracking.uri=sqlite:////m.db", "signing.trusted=[a.pub]"]
    assert call(config_of(*given), "m") == (
        "pipeline.api.champion('m', tracking_uri='sqlite:////m.db', workdir='there', trusted=['a.pub'])"
    )


BASE = [*TYPED, "kv=fp8"]


@pytest.mark.parametrize(
    ("stage", "command"),
    [
        ("build", lambda _: after("quantize", ["kv=fp8,int8"], sweep=True).command),
        ("evaluate", lambda _: after("build", BASE).command),
        ("recommend", lambda _: after("capacity", BASE).command),
        ("verify", lambda config: next_steps.after_promotion(config, Path("an engine")).command),
        ("prune", lambda config: next_steps.stage_command(config, "prune", "prune.apply=true")),
        ("promote", lambda config: next_steps.promotion_command(config, "promote.name='fp8 kv.sink_tokens=4'")),
    ],
)
def test_every_other_ending_names_a_command_that_composes(stage: str, command: Callable[[Config], str]) -> None:
    assert composed(NextStep("", command(config_of(*BASE)))).stage == stage


@pytest.mark.parametrize(
    ("kv", "says"),
    [
        ("int8", "stay with kv=fp16, or keep single layers in 16 bits with kv.overrides"),
        ("bf16", "no finer policy is left"),
    ],
)
def test_the_advice_after_the_last_policy_names_no_command(kv: str, says: str, tmp_path: Path) -> None:
    step = next_steps.after_judging(config_of(f"kv={kv}"), [candidate(tmp_path, kv, "FAIL")], [f"kv={kv}"])
    assert step.why.startswith(says)
    assert step.command is None


def test_a_wider_sweep_judges_the_finer_policy_by_a_sweep(tmp_path: Path) -> None:
    base = [*TYPED, "kv=int8_tensor,int4", "weights=none,fp8"]
    judged = [
        candidate(tmp_path, f"{kv} weights={weights}", "FAIL") for kv in ("int8_tensor", "int4") for weights in ("none", "fp8")
    ]
    step = next_steps.after_judging(plan(base, multirun=True).jobs[0], judged, base, swept=["kv", "weights"])
    assert composed(step).kv.name == "int8"


def test_the_command_of_one_candidate_of_a_sweep_has_no_launcher() -> None:
    """A launcher is refused without a sweep."""
    base = ["kv=fp8,int8", "seed=1", "hydra/launcher=ray", "+hydra.launcher.ray.init.num_cpus=2"]
    assert "hydra" not in next_steps.command_line(base, "kv=int8")
    assert "hydra/launcher=ray +hydra.launcher.ray.init.num_cpus=2" in next_steps.command_line(base, sweep=True)


def test_a_folder_named_like_a_key_stays_in_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kv" / "kv").mkdir(parents=True)
    shutil.copy(Path(__file__).parents[3] / "conf/kv/fp8.yaml", tmp_path / "kv/kv/my_fp8.yaml")
    planned = _plan_command(["--config-dir", "kv", "kv=my_fp8", "stage=status", f"workdir={tmp_path}"])
    assert not isinstance(planned, int)
    assert "--config-dir=kv" in shlex.split(next_steps.command_line(planned.arguments or (), "kv=int8"))
    assert len(plan(["kv=glob(my_*)"], multirun=True, folders=["kv"]).jobs) == 1
