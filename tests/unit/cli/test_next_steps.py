"""Every verdict ends with a next command. The printed command must compose, and its inputs must exist."""

import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.registry.candidates import judged_candidate
from helpers.registry.judged_engine import config_of

from pipeline.chain.inputs import checks
from pipeline.cli import console, next_steps
from pipeline.cli.next_steps import NextStep
from pipeline.config.compose import plan
from pipeline.config.config import Config
from pipeline.config.options import TINY
from stages.evaluate.inputs.samples import load_samples
from stages.verdict.candidate import Candidate
from stages.verdict.verdict import Check, Gate, Status

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
    folders = [argument.removeprefix("--config-dir=") for argument in arguments if argument.startswith("--config-dir=")]
    planned = plan([argument for argument in arguments if not argument.startswith("-")], "-m" in arguments, folders)
    sweeps = {argument for argument in arguments if argument.startswith("experiment=")} - {"experiment=quick"}
    assert planned.sweeping == ("-m" in arguments or bool(sweeps))
    for check in (check for job in planned.jobs for check in checks(job, OPENED)):
        check()
    return planned.jobs[0]


def executable(path: Path, content: str) -> None:
    path.parent.mkdir(parents=True)
    path.write_text(content)
    path.chmod(0o755)


def candidate(folder: Path, name: str, verdict: Status, needed: int = 0, gate: Gate = Gate.ACCURACY) -> Candidate:
    """Return a candidate that was judged by 100 samples; `needed` would decide."""
    judged = judged_candidate(folder, name.partition(" ")[0], verdict, metrics={"quality/samples": 100})
    bound = None if gate == Gate.NOISE_FLOOR else 0.0
    check = Check(gate=gate, where="copy", value=0.0, bound=bound, threshold=0.0, status=verdict, reason="mean KL")
    return judged.model_copy(update={"name": name, "samples_needed": needed, "checks": (check,)})


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
    judged = [candidate(tmp_path, name, verdict, 700) for name, verdict in verdicts.items()]
    config = plan([*TYPED, *base], multirun=sweeping).jobs[0]
    step = next_steps.after_judging(config, judged, [*TYPED, *base], swept=["kv"] if sweeping else [], unfinished=unfinished)
    after = composed(step)
    assert (after.stage, after.model.path, after.workdir) == (stage, TINY, "a dir/it's")
    assert kv is None or (after.kv.name, after.kv.sink_tokens) == (kv, 0)
    assert after.tracking.enabled
    assert "tracking=none" in base or after.tracking.experiment == "other one"
    assert stage == "promote" or after.gates.max_mean_kl == 0.2


@pytest.mark.parametrize(
    ("prompts", "advice"), [(20, "20 questions, 60 are needed: add questions, then judge it in full"), (60, "judge it in full")]
)
def test_a_quick_check_of_too_few_questions_suggests_more_questions(prompts: int, advice: str, tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": f"{n}:", "reference": "4711"}) for n in range(prompts)]
    (tmp_path / "own.jsonl").write_text("\n".join(lines))
    base = ["experiment=quick", "workloads=jsonl", f"workloads.jsonl={tmp_path}/own.jsonl"]
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv" / "mine.yaml").write_text("defaults: [int8]")
    config, typed = plan(base, multirun=False).jobs[0], [f"--config-dir={tmp_path}", "hydra/launcher=joblib", *base]
    step = next_steps.after_judging(config, [candidate(tmp_path, "fp8", "INCONCLUSIVE")], typed)
    assert advice in step.why
    assert not composed(step).workloads.is_quick_check


def test_a_promotion_finds_the_experiments_engines(tmp_path: Path) -> None:
    config = plan(["experiment=smollm2"], multirun=True).jobs[0]
    judged = [candidate(tmp_path, "fp8", "PASS")]
    after = composed(next_steps.after_judging(config, judged, ["experiment=smollm2"], swept=["kv"]))
    assert (after.stage, after.work, after.model) == ("promote", config.work, config.model)


@pytest.mark.parametrize(
    ("base", "needed", "gate", "says"),
    [
        (["workloads=gsm8k", "workloads.gsm8k=60"], 5000, Gate.ACCURACY, "workloads.gsm8k=1319"),
        (["workloads=jsonl", "workloads.jsonl=mine.jsonl"], 500, Gate.ACCURACY, "add questions to mine.jsonl; ask"),
        (["workloads.samples.copy=4"], 800, Gate.MIN_SAMPLES, "workloads.samples.copy=32"),
        ([], 0, Gate.NOISE_FLOOR, "more questions would not decide: mean KL"),
        (["workloads.lengths=[1024,2048]"], 200, Gate.RECOVERY, "workloads.length_documents=30"),
        (["gates.attempt=20"], 700, Gate.RECOVERY, "fp8: undecided: recovery; no further attempt"),
        ([], 0, Gate.RECOVERY, "samples.tool_call=640"),
        (["workloads.samples.copy=60000"], 0, Gate.MEAN_KL, "judge int8, which keeps more"),  # four times are refused
    ],
)
def test_the_suggested_change_depends_on_the_undecided_gates(
    tmp_path: Path, base: list[str], needed: int, gate: Gate, says: str
) -> None:
    judged = candidate(tmp_path, "fp8", "INCONCLUSIVE", needed, gate)
    step = next_steps.after_judging(config_of(*base), [judged], base)
    assert says in f"{step.why} {step.command}"
    if step.command is not None:
        assert load_samples(composed(step).workloads), "the suggested questions exist"


@pytest.mark.parametrize("on_path", [True, False])
def test_a_command_and_an_error_begin_with_the_script_that_the_user_ran(
    on_path: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "own env" / "kvgate"
    executable(script, "")
    monkeypatch.setattr(sys, "argv", [str(script), "kv=fp8"])
    monkeypatch.setenv("PATH", str(script.parent if on_path else tmp_path))
    begins = "kvgate" if on_path else shlex.quote(str(script))
    assert next_steps.command_line(["kv=fp8"], "stage=build") == f"{begins} kv=fp8 stage=build"
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


BASE = [*TYPED, "kv=fp8"]


@pytest.mark.parametrize(
    ("stage", "command"),
    [
        ("verify", lambda config: next_steps.after_promotion(config, Path("an engine")).command),
        ("prune", lambda config: next_steps.stage_command(config, "prune", "prune.apply=true")),
        ("promote", lambda config: next_steps.stage_command(config, "promote", "promote.name='fp8 kv.sink_tokens=4'")),
    ],
)
def test_every_other_ending_names_a_command_that_composes(stage: str, command: Callable[[Config], str]) -> None:
    assert composed(NextStep("", command(config_of(*BASE)))).stage == stage


def test_the_advice_after_the_last_policy_names_no_command(tmp_path: Path) -> None:
    step = next_steps.after_judging(config_of("kv=int8"), [candidate(tmp_path, "int8", "FAIL")], ["kv=int8"])
    assert step.why.startswith("no finer policy is left: stay with kv=fp16, or keep single layers in 16 bits")
    assert step.command is None


def test_the_command_of_one_candidate_of_a_sweep_has_no_launcher() -> None:
    """A launcher is refused without a sweep."""
    base = ["kv=fp8,int8", "seed=1", "hydra/launcher=ray", "+hydra.launcher.ray.init.num_cpus=2"]
    assert "hydra" not in next_steps.command_line(base, "kv=int8")
    assert "hydra/launcher=ray +hydra.launcher.ray.init.num_cpus=2" in next_steps.command_line(base, sweep=True)


def test_the_key_of_a_signed_evaluation_is_not_repeated_for_its_promotion(tmp_path: Path) -> None:
    (tmp_path / "key.pub").write_text("")
    base = ["kv=int8", "signing.key=key.pem", "signing.trusted=[key.pub]"]
    step = next_steps.after_judging(config_of(*base), [candidate(tmp_path, "int8", "PASS")], base)
    assert step.command is not None
    arguments = shlex.split(step.command)[3:]
    assert "stage=promote" in arguments
    assert "signing.trusted=[key.pub]" in arguments
    assert "signing.key=key.pem" not in arguments


@pytest.mark.parametrize("verdict", ["FAIL", "INCONCLUSIVE"])
def test_no_policy_is_advised_if_the_must_fail_control_passed(tmp_path: Path, verdict: Status) -> None:
    judged = candidate(tmp_path, "fp8", verdict)
    unseen = Check(
        gate=Gate.MUST_FAIL_CONTROL, where="control", value=0.0, threshold=1.0, status="FAIL", reason="no gate noticed"
    )
    step = next_steps.after_judging(config_of(), [judged.model_copy(update={"checks": (*judged.checks, unseen)})], [])
    assert step.command is None
    assert "a corrupted cache gave the same results" in step.why
