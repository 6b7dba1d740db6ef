"""Which step a verdict calls for. `pipeline.cli.next_steps` writes the commands."""

import math
from collections.abc import Sequence

from pipeline.cli.next_steps import NextStep, command_line, promotion_command, standing
from pipeline.config import CONF
from pipeline.config.config import Config
from pipeline.config.policies import load_policies
from stages.core.errors import CannotBeJudged
from stages.policies.policy import KVShape
from stages.verdict.candidate import Candidate, is_blind
from stages.verdict.thresholds import Check
from stages.workloads.config import LONG

MAX_QUESTIONS = 100_000
"""Maximum samples of a workload (`workloads.samples`)."""
QUICK_CHECK = ("experiment=quick", "workloads.conformance_samples=0")
"""Arguments that make an evaluation a quick check."""
SHAPE = KVShape(layers=32, kv_heads=8, head_dim=128)
"""Model shape for comparing the bytes of policies."""

BLIND = (
    "ask a trained model questions whose answers are in the prompt: a corrupted cache gave the same results and this "
    "evaluation cannot tell policies apart (docs/verdict.md#inconclusive-what-now)"
)
"""Advice if the must-fail control passed."""


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
    command: str | None = command_line(base, sweep=sweep)
    if unfinished:
        why = "finish the sweep; finished work is reused"
    elif all(is_blind(candidate.checks) for candidate in candidates):
        why, command = BLIND, None
    elif "PASS" in verdicts and config.tracking.enabled:
        why, command = "make the best that passed the champion", promotion_command(config)
    elif "PASS" in verdicts:
        untracked = [part for part in base if not part.lstrip("+").startswith("tracking")]
        why = "register the candidates that passed, so that one can be promoted (finished work is reused)"
        command = command_line(untracked, "stage=evaluate", sweep=sweep)
    elif "INCONCLUSIVE" not in verdicts:
        return _judge_finer(config, candidates, base, swept)
    elif config.workloads.is_quick_check:
        remaining = [part for part in base if part.lstrip("+").replace("'", "") not in QUICK_CHECK]
        conformance = [] if len(remaining) < len(base) else ["workloads.conformance_samples=2"]
        why, command = "judge it in full", command_line(remaining, *conformance, sweep=sweep)
    else:
        undecided = [candidate for candidate in candidates if candidate.verdict == "INCONCLUSIVE"]
        return _ask_more(config, undecided, base, swept)
    return NextStep(why=why, command=command)


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
            "does, or use check mention (docs/questions.md#my-questions)"
        )
    return NextStep(wrong=list(error.wrong), why=why, command=command_line(base, *changes, sweep=sweep) if changes else None)


def _ask_more(config: Config, undecided: Sequence[Candidate], base: Sequence[str], swept: Sequence[str]) -> NextStep:
    """Return a step with enough questions to decide these candidates, or with the reason why no number would decide."""
    needed: dict[str, int] = {}
    for candidate in undecided:
        for name, count in candidate.samples_needed.items():
            needed[name] = max(count, needed.get(name, 0))
    open_checks = [check for candidate in undecided for check in candidate.checks if check.status == "INCONCLUSIVE"]
    headings = dict.fromkeys(check.gate.heading[0].lower() + check.gate.heading[1:] for check in open_checks)
    state = f"{', '.join(candidate.name for candidate in undecided)}: undecided: {', '.join(headings)}"
    following = config.gates.next_attempt
    # The bounds of the next attempt widen with the logarithm of its level. Without a known number, ask twice the questions.
    alpha = config.gates.pass_alpha if following is None else following.pass_alpha
    factor = math.log(alpha) / math.log(config.gates.pass_alpha) * (1 if needed else 2)
    questions = config.workloads.asking_more(needed, factor)
    more = bool(questions.overrides or questions.own_too_few)
    reason = _reason_against_more(open_checks, counted=bool(needed), possible=more or following is None)
    if reason is not None:
        return NextStep(why=f"{state}; more questions would not decide: {reason}; see docs/verdict.md#inconclusive-what-now")
    if following is None or questions.largest > MAX_QUESTIONS:
        step = _judge_finer(config, undecided, base, swept)
        return step.model_copy(update={"why": f"{state}; no further attempt can decide it; {step.why}"})
    only_policies = all(key == "kv" for key in swept)
    changes = [*questions.overrides, f"gates.attempt={following.attempt}"]
    if swept and only_policies:
        changes.insert(0, "kv=" + ",".join(dict.fromkeys(candidate.policy for candidate in undecided)))
    add = f"; add questions to {config.workloads.jsonl}" if questions.own_too_few else ""
    command = command_line(base, *changes, sweep=len(undecided) > 1 or not only_policies)
    return NextStep(why=f"{state}{add}; ask enough questions to decide it", command=command)


def _reason_against_more(open_checks: Sequence[Check], *, counted: bool, possible: bool) -> str | None:
    """Return the reason why more questions decide nothing, or None.

    `counted`: whether any number of questions is known to decide. `possible`: whether more questions can be asked.
    """
    for check in open_checks:
        if not counted and check.bound is None:  # such as the engine's own noise
            return check.reason
    if possible:
        return None
    return open_checks[0].reason if open_checks else "no check was recorded"


def _judge_finer(config: Config, failed: Sequence[Candidate], base: Sequence[str], swept: Sequence[str]) -> NextStep:
    """Return a step that judges the next policy with more bytes than all judged ones; if there is none, a search by layer."""
    shipped, names = {path.stem for path in (CONF / "kv").glob("*.yaml")}, {candidate.policy for candidate in failed}
    largest = max(policy.bytes_per_token(SHAPE) for policy in (config.kv, *load_policies("kv", sorted(names & shipped))))
    ladder = load_policies("kv", config.backend.finer)
    finer = next((policy for policy in ladder if policy.bytes_per_token(SHAPE) > largest and policy.name not in names), None)
    if finer is not None:
        still = any(key.partition(".")[0] != "kv" for key in swept)  # `kv=` also replaces `kv.*`
        # The attempts so far were attempts of another candidate.
        attempt = ["gates.attempt=1"] if config.gates.attempt > 1 else []
        command = command_line(base, f"kv={finer.name}", *attempt, sweep=still)
        return NextStep(why=f"judge {finer.name}, which keeps more", command=command)
    why = "no finer uniform policy is left: search formats by layer and side"
    return NextStep(why=why, command=standing(config, "tune"))
