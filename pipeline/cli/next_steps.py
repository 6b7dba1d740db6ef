"""The suggested next command, which a command prints at its end.

The command is complete and ready to paste. For stages that work on checkpoints, it repeats the user's arguments with some
changes. For stages that work on earlier results, it has all settings that differ from the defaults: repeating an `experiment=`
would start another sweep.
"""

import math
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field
from rich.markup import escape

from pipeline.cli import console
from pipeline.config import CONF
from pipeline.config.compose import plan
from pipeline.config.config import Config
from pipeline.config.override_syntax import differing, key_of, written
from pipeline.config.policies import load_policies
from pipeline.config.stages import StageFacts
from stages.core.errors import CannotBeJudged
from stages.core.strict import StrictModel
from stages.engines.config import BackendConfig, InterpreterConfig
from stages.policies.policy import KVShape
from stages.verdict.candidate import Candidate, is_blind
from stages.workloads.config import GSM8K_PROBLEMS, LONG, LONG_QUESTIONS, more_documents

MOST_QUESTIONS = 100_000
"""Maximum samples of a workload (`workloads.samples`)."""
FIRST_LOOK = ("experiment=quick", "workloads.conformance_samples=0")
"""Arguments that make an evaluation a first look."""
SHAPE = KVShape(layers=32, kv_heads=8, head_dim=128)
"""Model shape for comparing the bytes of policies."""


def command_line(base: Sequence[str], *changes: str, sweep: bool = False) -> str:
    """Return the command with the arguments `base`, without `log=`. `changes` replace arguments with the same keys.

    A change of a group also removes the keys of this group from `base`: `kv=fp8` removes `kv.window`. Only a sweep keeps its
    launcher. The command begins with `python`, or with the path of this Python if a shell would not find it.
    """
    running, on_path = Path(sys.executable), shutil.which("python")
    same = on_path is not None and Path(on_path).absolute().parent == running.parent
    changed = {"log", *map(key_of, changes)}
    launcher = () if sweep else ("hydra/launcher", "hydra.launcher")
    keys = [(part, key_of(part)) for part in base]
    kept = [part for part, key in keys if not {key, key.partition(".")[0]} & changed and not key.startswith(launcher)]
    arguments = shlex.join([*(["-m"] if sweep else []), *kept, *changes])
    return f"{'python' if same else shlex.quote(str(running))} -m pipeline {arguments}".rstrip()


def standing(config: Config, stage: str, *changes: str) -> str:
    """Return the command of a stage that works on earlier results."""
    return command_line(carried(config), f"stage={stage}", *changes)


def promotion_command(config: Config, *changes: str) -> str:
    """Return the command of a promotion, which decides by the same gates.

    The Python of a backend is not in the evidence, and serving the engine needs it.
    """
    python = config.backend.python if isinstance(config.backend, InterpreterConfig) else None
    python_keys = [] if python is None else [f"backend={config.backend.name}", f"backend.python={written(python)}"]
    return command_line(carried(config, "gates"), "stage=promote", *python_keys, *changes)


def carried(config: Config, *groups: str) -> list[str]:
    """Return the settings of model, workdir, tracking, signing and `groups` that differ from the defaults."""
    values, standard = config.model_dump(mode="json"), _defaults()
    names = ("model", "workdir", "tracking", "signing", *groups)
    return [part for name in names for part in differing(name, values[name], standard[name])]


@cache
def _defaults() -> dict[str, Any]:
    """Return the default values of all keys."""
    return plan([], multirun=False).jobs[0].model_dump(mode="json")


class NextStep(StrictModel):
    """A suggestion for the next step."""

    why: str
    command: str | None = None
    """Shell command; null if the step is not a command."""
    wrong: list[str] = Field(default=[])
    """Some wrong answers of the baseline, which the step follows from."""


def show(step: NextStep | None) -> None:
    """Print a suggestion, if there is one."""
    if step is None:
        return
    lines = [
        "",
        *(f"  {escape(line)}" for line in step.wrong),
        f"[bold]Next[/]: {escape(step.why)}{':' if step.command is not None else ''}",
    ]
    if step.command is not None:
        lines.append(f"  {escape(step.command)}")
    console.result("next", *lines, paste=True, **step.model_dump())


def after_stage(facts: StageFacts, base: Sequence[str], *, sweep: bool = False) -> NextStep | None:
    """Return the next step after a stage that ended well; None if no stage follows."""
    if facts.following is None:
        return None
    stage, why = facts.following
    return NextStep(why=why, command=command_line(base, f"stage={stage}", sweep=sweep))


def after_judging(
    config: Config,
    candidates: Sequence[Candidate],
    base: Sequence[str],
    *,
    swept: Sequence[str] = (),
    unfinished: bool = False,
) -> NextStep:
    """Return the next step after the verdicts of an evaluation or a sweep, whose jobs differ in the keys `swept`.

    `base` are the user's arguments.
    """
    sweep, verdicts = bool(swept), {candidate.verdict for candidate in candidates}
    if unfinished:
        return NextStep(why="finish the sweep; finished work is reused", command=command_line(base, sweep=sweep))
    if all(is_blind(candidate.checks) for candidate in candidates):
        return NextStep(
            why="ask a trained model questions whose answers are in the prompt: a corrupted cache gave the same results and "
            "this evaluation cannot tell policies apart (docs/verdict.md#inconclusive-what-now)"
        )
    if config.workloads.is_first_look and "PASS" not in verdicts and verdicts != {"FAIL"}:
        kept = [part for part in base if part.lstrip("+").replace("'", "") not in FIRST_LOOK]
        asked = [] if len(kept) < len(base) else ["workloads.conformance_samples=2"]
        return NextStep(why="judge it in full", command=command_line(kept, *asked, sweep=sweep))
    if "PASS" in verdicts and config.tracking.enabled:
        return NextStep(why="make the best that passed the champion", command=promotion_command(config))
    if "PASS" in verdicts:
        without = [part for part in base if not part.lstrip("+").startswith("tracking")]
        why = "register the candidates that passed, so that one can be promoted (finished work is reused)"
        return NextStep(why=why, command=command_line(without, "stage=evaluate", sweep=sweep))
    undecided = [candidate for candidate in candidates if candidate.verdict == "INCONCLUSIVE"]
    return _ask_more(config, undecided, base, swept) if undecided else _finer(config, candidates, base, swept)


def after_weak(config: Config, error: CannotBeJudged, base: Sequence[str], *, sweep: bool = False) -> NextStep:
    """Return the next step if the baseline fails some workloads."""
    weak, able = error.weak, error.able
    lengths = [name.removeprefix(LONG) for name in able if name.startswith(LONG)]
    changes: list[str] = []
    if lengths and all(name.startswith(LONG) for name in weak):
        why = f"judge it at the lengths where the model itself answers ({', '.join(lengths)} tokens)"
        changes = [f"workloads.lengths=[{','.join(lengths)}]"]
    elif able and all(config.workloads.samples.get(name) for name in weak):  # type: ignore[call-overload]
        why, changes = f"judge it on what it can do ({', '.join(able)})", [f"workloads.samples.{name}=0" for name in weak]
    else:
        why = (
            "ask questions that this model answers: workloads=chat calibration=chat, or your own, one JSON object a line, as "
            "workloads=jsonl workloads.jsonl=FILE. If its answers are right in other words, word the references as the model "
            "does, or use check mention (docs/start.md#my-questions)"
        )
    return NextStep(wrong=list(error.wrong), why=why, command=command_line(base, *changes, sweep=sweep) if changes else None)


def _ask_more(config: Config, undecided: Sequence[Candidate], base: Sequence[str], swept: Sequence[str]) -> NextStep:
    """Return a step with enough questions to decide these candidates, or with the reason why no number would decide."""
    # Sorted: the largest number of a workload is its last.
    needed = dict(sorted(item for candidate in undecided for item in candidate.samples_needed.items()))
    still_open = [check for candidate in undecided for check in candidate.checks if check.status == "INCONCLUSIVE"]
    titles = dict.fromkeys(check.gate.heading for check in still_open)
    names, gates = (candidate.name for candidate in undecided), (title[0].lower() + title[1:] for title in titles)
    state = f"{', '.join(names)}: open is {', '.join(gates)}"
    stuck = [check.reason for check in still_open if not needed and check.bound is None]  # such as the engine's own noise
    following = config.gates.next_attempt
    # The bounds of the next attempt widen with the logarithm of its level. Without a known number, ask twice the questions.
    alpha = config.gates.pass_alpha if following is None else following.pass_alpha
    factor = math.log(alpha) / math.log(config.gates.pass_alpha) * (1 if needed else 2)
    questions = _more_questions(config, needed, factor)
    changes = questions.overrides
    if following is not None and not (changes or questions.own_too_few):
        stuck += [*(check.reason for check in still_open), "no check was recorded"]
    if stuck:
        return NextStep(why=f"{state}; more questions would not decide: {stuck[0]}; see docs/verdict.md#inconclusive-what-now")
    if following is None or questions.largest > MOST_QUESTIONS:
        step = _finer(config, undecided, base, swept)
        return step.model_copy(update={"why": f"{state}, and another attempt would not decide it: {step.why}"})
    only_policies = all(key == "kv" for key in swept)
    if swept and only_policies:
        changes.insert(0, "kv=" + ",".join(dict.fromkeys(candidate.policy for candidate in undecided)))
    add = f"; add questions to {config.workloads.jsonl}" if questions.own_too_few else ""
    command = command_line(base, *changes, f"gates.attempt={following.attempt}", sweep=len(undecided) > 1 or not only_policies)
    return NextStep(why=f"{state}{add}; ask enough questions to decide it", command=command)


class MoreQuestions(NamedTuple):
    """Overrides for more generated questions, whether the user's own are too few, and the largest number of a workload."""

    overrides: list[str]
    own_too_few: bool
    largest: int


def _more_questions(config: Config, needed: Mapping[str, int], factor: float) -> MoreQuestions:
    """Return the overrides that ask `factor` times the configured questions of each workload, and at least `needed`."""
    counts = {
        name: max(math.ceil(factor * count), needed.get(name, needed.get("all", 0)))
        for name, count in config.workloads.samples.items()
        if count
    }
    changes = [f"workloads.samples.{name}={count}" for name, count in counts.items()]
    changes += [f"workloads.gsm8k={min(needed['gsm8k'], GSM8K_PROBLEMS)}"] if "gsm8k" in needed else []
    if config.workloads.lengths:
        now = math.ceil(factor * config.workloads.length_documents) * LONG_QUESTIONS
        changes += more_documents({**needed, LONG: now})
    own_too_few = any(name not in (*counts, "all", "gsm8k") and not name.startswith(LONG) for name in needed)
    return MoreQuestions(changes, own_too_few, max((*counts.values(), *needed.values()), default=0))


def _finer(config: Config, failed: Sequence[Candidate], base: Sequence[str], swept: Sequence[str]) -> NextStep:
    """Return a step that judges the next finer policy than the largest failed one, or else the search by layer."""
    shipped, names = {path.stem for path in (CONF / "kv").glob("*.yaml")}, {candidate.policy for candidate in failed}
    least = max(policy.bytes_per_token(SHAPE) for policy in (config.kv, *load_policies("kv", sorted(names & shipped))))
    ladder = load_policies("kv", config.backend.finer)
    finer = next((policy for policy in ladder if policy.bytes_per_token(SHAPE) > least and policy.name not in names), None)
    if finer is not None:
        still = any(key.partition(".")[0] != "kv" for key in swept)  # `kv=` also replaces `kv.*`
        first = ["gates.attempt=1"] if config.gates.attempt > 1 else []  # of another candidate
        command = command_line(base, f"kv={finer.name}", *first, sweep=still)
        return NextStep(why=f"judge {finer.name}, which keeps more", command=command)
    why = "no finer uniform policy is left: search formats by layer and side"
    return NextStep(why=why, command=standing(config, "tune"))


SERVING = {
    "engine_args.yaml": "{1}vllm serve {0}/checkpoint --config {0}/engine_args.yaml",
    "llm_args.yaml": "{1}trtllm-serve {0}/checkpoint --config {0}/llm_args.yaml",
    "engine/config.json": "{1}trtllm-serve {0}/engine --tokenizer {0} --backend tensorrt",
    "launch.txt": "(cd {0} && {1}sh launch.txt)",
}
"""File of a bundle -> the shell command that serves the bundle."""


def serving(engine: Path, backend: BackendConfig | None = None) -> str:
    """Return the command that serves an engine, or the Python call that loads it.

    `backend` is the configuration that judged it, if known: its Python's folder goes first on PATH.
    """
    command = next((command for file, command in SERVING.items() if (engine / file).is_file()), None)
    python = backend.python if isinstance(backend, InterpreterConfig) else None
    folder = Path(python).expanduser().absolute().parent if python is not None and "/" in python else None
    path = f'env PATH={shlex.quote(str(folder))}:"$PATH" ' if folder is not None else ""
    return f"pipeline.api.load({str(engine)!r})" if command is None else command.format(shlex.quote(str(engine)), path)


def after_promotion(config: Config, engine: Path) -> NextStep:
    trusted = differing("signing.trusted", list(config.signing.trusted), [])
    bundle = f"bundle={written(str(engine))}"
    return NextStep(why="verify the engine that serves", command=command_line(trusted, "stage=verify", bundle))


def after_tuning(config: Config, chosen: str, folder: Path | None, base: Sequence[str]) -> NextStep:
    """Return the step that judges the chosen policy, from the configuration folder `folder` or, if None, from conf/."""
    arguments = [part for part in base or carried(config) if not part.lstrip("+~").startswith("tune.")]
    if folder is not None and f"--config-dir={folder}" not in arguments:
        arguments = [f"--config-dir={folder}", *arguments]
    return NextStep(why=f"judge {chosen}", command=command_line(arguments, "stage=evaluate", f"kv={chosen}"))
