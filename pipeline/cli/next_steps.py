"""The next step that a command suggests at its end.

The suggested command is complete and ready to paste. For stages that work on checkpoints, the command repeats the user's
arguments with some changes. For stages that work on earlier results, repeating an `experiment=` would start another sweep.
There the command instead names the settings that the stage needs and that differ from the defaults.
"""

import math
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pipeline.cli import console
from pipeline.config import CONF
from pipeline.config.compose import plan
from pipeline.config.config import Config
from pipeline.config.options import shipped_policy
from pipeline.config.override_syntax import differing, key_of, written
from stages.core.streams import program_name
from stages.policies.policy import KVShape
from stages.verdict.candidate import Candidate, is_blind

MAX_QUESTIONS = 100_000
"""Maximum samples of a workload (`workloads.samples`)."""
UNKNOWN_FACTOR = 4.0
"""Factor of the questions if no number is known to decide. The next attempt may need twice as many for the same bound."""
QUICK_CHECK = ("experiment=quick", "workloads.conformance_samples=0")
"""Arguments that make an evaluation a quick check."""
SHAPE = KVShape(layers=32, kv_heads=8, head_dim=128)
"""Model shape for comparing the bytes of policies."""
FOLDER = "--config-dir="
"""Beginning of an argument that names a folder with the user's options."""


def command_line(base: Sequence[str], *changes: str, sweep: bool = False) -> str:
    """Return the command with the arguments `base`, without `log=`. `changes` replace arguments with the same keys.

    A change of a group also removes the keys of this group from `base`: `kv=fp8` removes `kv.window`. Only a sweep keeps its
    launcher.
    """
    arguments = shlex.join([*(["-m"] if sweep else []), *_arguments(base, *changes, sweep=sweep)])
    return f"{_program()} {arguments}".rstrip()


def _arguments(base: Sequence[str], *changes: str, sweep: bool) -> list[str]:
    changed = {"log", *map(key_of, changes)}
    launcher = () if sweep else ("hydra/launcher", "hydra.launcher")
    keys = [(part, key_of(part)) for part in base]
    remaining = [part for part, key in keys if not {key, key.partition(".")[0]} & changed and not key.startswith(launcher)]
    return [*remaining, *changes]


def _program() -> str:
    """Return the program that begins a command: the script `kvgate` or Python with the module; a path if PATH lacks it."""
    script, running = Path(sys.argv[0]).absolute(), Path(sys.executable)
    if program_name() == "kvgate" and os.access(script, os.X_OK):
        found = shutil.which("kvgate")
        return "kvgate" if found is not None and Path(found).absolute() == script else shlex.quote(str(script))
    found = shutil.which("python")
    same = found is not None and Path(found).absolute().parent == running.parent
    return f"{'python' if same else shlex.quote(str(running))} -m pipeline"


def stage_command(config: Config, stage: str, *changes: str) -> str:
    """Return the command of a stage that works on earlier results. A promotion decides by the same gates."""
    groups = ("gates",) if stage == "promote" else ()
    return command_line(carried(config, *groups), f"stage={stage}", *changes)


def carried(config: Config, *groups: str) -> list[str]:
    """Return the settings of model, workdir, tracking, trusted keys and `groups` that differ from the defaults."""
    # Stages that work on earlier results sign nothing, and refuse signing.key.
    values, standard = config.model_dump(mode="json", exclude={"signing": {"key"}}), _defaults()
    names = ("model", "workdir", "tracking", "signing", *groups)
    return [part for name in names for part in differing(name, values[name], standard[name])]


@cache
def _defaults() -> dict[str, Any]:
    return plan([], multirun=False).jobs[0].model_dump(mode="json")


@dataclass(frozen=True)
class NextStep:
    why: str
    command: str | None = None
    """Shell command; None if the step is not a command."""

    def show(self) -> None:
        colon = "" if self.command is None else ":"
        console.say("")
        console.say(console.styled("bold", "Next", f": {self.why}{colon}"), paste=True)
        if self.command is not None:
            console.say(f"  {self.command}", paste=True)


SERVING = {
    "engine_args.yaml": "vllm serve {0}/checkpoint --config {0}/engine_args.yaml",
    "llm_args.yaml": "trtllm-serve {0}/checkpoint --config {0}/llm_args.yaml",
    "engine/config.json": "trtllm-serve {0}/engine --tokenizer {0} --backend tensorrt",
    "launch.txt": "(cd {0} && sh launch.txt)",
}
"""File of a bundle -> the shell command that serves the bundle."""


def serving(engine: Path) -> str:
    """Return the command that serves an engine, in the environment of its library, or the Python call that loads it."""
    command = next((command for file, command in SERVING.items() if (engine / file).is_file()), None)
    return f"pipeline.api.load({str(engine)!r})" if command is None else command.format(shlex.quote(str(engine)))


def after_promotion(config: Config, engine: Path) -> NextStep:
    trusted = differing("signing.trusted", list(config.signing.trusted), [])
    bundle = f"bundle={written(str(engine))}"
    return NextStep("verify the engine that serves", command_line(trusted, "stage=verify", bundle))


def after_judging(
    config: Config, candidates: Sequence[Candidate], base: Sequence[str], *, swept: Sequence[str] = (), unfinished: bool = False
) -> NextStep:
    """Return the next step after the verdicts of an evaluation, or of a sweep whose jobs differ in the keys `swept`."""
    sweep, undecided = bool(swept), [candidate for candidate in candidates if candidate.verdict == "INCONCLUSIVE"]
    if unfinished:
        return NextStep("finish the sweep; finished work is reused", command_line(base, sweep=sweep))
    if all(is_blind(candidate.checks) for candidate in candidates):
        return NextStep(
            "ask a trained model questions whose answers are in the prompt: a corrupted cache gave the same results and this "
            "evaluation cannot tell policies apart (docs/verdict.md#inconclusive-what-now)"
        )
    if any(candidate.verdict == "PASS" for candidate in candidates):
        if config.tracking.enabled:
            return NextStep("promote the best candidate that passed", stage_command(config, "promote"))
        untracked = [part for part in base if not part.lstrip("+").startswith("tracking")]
        why = "register the candidates that passed, so that one can be promoted (finished work is reused)"
        return NextStep(why, command_line(untracked, "stage=evaluate", sweep=sweep))
    if undecided and config.workloads.is_quick_check:
        remaining = [part for part in base if part.lstrip("+").replace("'", "") not in QUICK_CHECK]
        conformance = [] if len(remaining) < len(base) else ["workloads.conformance_samples=2"]
        from stages.evaluate.inputs.samples import load_samples
        from stages.verdict.gates.checks import too_few

        arguments = _arguments(remaining, *conformance, sweep=sweep)
        folders = [argument.removeprefix(FOLDER) for argument in arguments if argument.startswith(FOLDER)]
        full = plan([argument for argument in arguments if not argument.startswith(FOLDER)], sweep, folders).jobs[0]
        few = too_few(load_samples(full.workloads), full.gates)
        why = "judge it in full" if few is None else f"{few}: add questions, then judge it in full"
        return NextStep(why, command_line(remaining, *conformance, sweep=sweep))
    return _ask_more(config, undecided, base, swept) if undecided else _judge_finer(config, candidates, base, swept)


def _ask_more(config: Config, undecided: Sequence[Candidate], base: Sequence[str], swept: Sequence[str]) -> NextStep:
    """Return the step that asks enough questions to decide, judges a finer policy, or explains why more would not decide."""
    open_checks = [check for candidate in undecided for check in candidate.checks if check.status == "INCONCLUSIVE"]
    headings = dict.fromkeys(check.gate.heading[0].lower() + check.gate.heading[1:] for check in open_checks)
    state = f"{', '.join(candidate.name for candidate in undecided)}: undecided: {', '.join(headings)}"
    following = config.gates.next_attempt
    factor = max(candidate.samples_needed / candidate.metrics.get("quality/samples", math.inf) for candidate in undecided)
    more = config.workloads.more_questions(factor or UNKNOWN_FACTOR)
    reasons = [check.reason for check in open_checks if check.bound is None and not factor]  # such as the engine's own noise
    if following is not None and not more and config.workloads.jsonl is None:
        reasons += [*(check.reason for check in open_checks), "no check was recorded"]
    if reasons:
        return NextStep(f"{state}; more questions would not decide: {reasons[0]}; see docs/verdict.md#inconclusive-what-now")
    if following is None or any(int(override.partition("=")[2]) > MAX_QUESTIONS for override in more):
        step = _judge_finer(config, undecided, base, swept)
        return NextStep(f"{state}; no further attempt can decide it; {step.why}", step.command)
    only_policies = all(key == "kv" for key in swept)
    changes = [*more, f"gates.attempt={following.attempt}"]
    if swept and only_policies:
        changes.insert(0, "kv=" + ",".join(dict.fromkeys(candidate.policy for candidate in undecided)))
    add = f"; add questions to {config.workloads.jsonl}" if config.workloads.jsonl is not None else ""
    command = command_line(base, *changes, sweep=len(undecided) > 1 or not only_policies)
    return NextStep(f"{state}{add}; ask enough questions to decide it", command)


def _judge_finer(config: Config, failed: Sequence[Candidate], base: Sequence[str], swept: Sequence[str]) -> NextStep:
    """Return a step that judges the next policy with more bytes than every judged policy, or says how to keep more."""
    names = {candidate.policy for candidate in failed}
    shipped = [shipped_policy(name) for name in names if (CONF / "kv" / f"{name}.yaml").is_file()]
    largest = max(policy.bytes_per_token(SHAPE) for policy in (config.kv, *shipped))
    ladder = map(shipped_policy, config.backend.finer)
    finer = next((policy for policy in ladder if policy.bytes_per_token(SHAPE) > largest and policy.name not in names), None)
    if finer is None:
        place = "docs/policies.md#change-a-policy-on-the-command-line"
        why = f"no finer policy is left: stay with kv=fp16, or keep single layers in 16 bits with kv.overrides ({place})"
        return NextStep(why)
    still = any(key.partition(".")[0] != "kv" for key in swept)  # `kv=` also replaces `kv.*`
    # The earlier attempts judged other candidates, so counting starts again.
    attempt = ["gates.attempt=1"] if config.gates.attempt > 1 else []
    return NextStep(f"judge {finer.name}, which keeps more", command_line(base, f"kv={finer.name}", *attempt, sweep=still))
