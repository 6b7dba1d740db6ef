"""`dry=true`: prints the artifacts that each job would make or reuse, and its foreseeable failures. Nothing is written.

A job takes its steps over a `DryStore`, which returns existing artifacts, and stand-ins for missing artifacts. The key of a
missing artifact is unknown if an input is missing too. A stand-in uses the digest of its recipe instead, so that two jobs of a
sweep with equal recipes share one stand-in.
"""

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from pipeline.chain.inputs import checks
from pipeline.chain.job import Run
from pipeline.chain.stage_functions import promotable
from pipeline.cli import console
from pipeline.cli.console import Column, Grid, Value
from pipeline.cli.progress import duration
from pipeline.config.compose import Plan
from pipeline.store.store import Store
from stages.checkpoints.intake.shapes import read_model
from stages.checkpoints.places import locate_checkpoint
from stages.core.artifact import Artifact, Recipe
from stages.core.errors import DEFECT, EXIT_CODES, SEVERITY, GateRefusal, UserError, describe, exit_code, required_libraries
from stages.engines.onnx.config import OnnxRuntimeConfig
from stages.planning.duration import verdict_work
from stages.verdict.candidate import none_accepted
from stages.verdict.gates.decide import decide
from stages.verdict.report import load_report, load_rows
from stages.verdict.verdict import Verdict
from stages.workloads.config import LONG, LONG_QUESTIONS

COLUMNS = list(map(Column, ("artifact", "job", "is")))
MIN_SECONDS = 30
"""Minimum estimated duration of a verdict, in seconds, for which the estimate is printed."""


class StandIn(Artifact):
    exists = False

    def digest_under(self, folder: str) -> str:  # noqa: ARG002
        return self.key


class DryStore(Store):
    makes = False

    def make(self, recipe: Recipe, build: Callable[[Path], object], *, resumable: bool = False) -> Artifact:  # noqa: ARG002
        path, key = self.path(recipe), recipe.key
        files = defaultdict[str, str](lambda: key)
        stand_in = StandIn(path=path, stage=recipe.stage, key=key, digest=key, files=files, parts=recipe.parts)
        return self.verified(recipe) or stand_in


@dataclass
class Preview:
    """The artifacts, verdicts and failures that a dry run foresees. Jobs are numbered from 1."""

    artifacts: list[tuple[int, str, Artifact]] = field(default_factory=list)
    """(job, title, artifact) of every step."""
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    """Display names of jobs that are judged already -> their verdicts."""
    too_few: list[str] = field(default_factory=list)
    """Problems of jobs that ask too few questions for a PASS."""
    problems: dict[tuple[int, str], list[int]] = field(default_factory=dict)
    """(exit code, line of the message) -> numbers of the affected jobs."""

    def check(self, job: int, check: Callable[[], object]) -> int:
        """Run a check, record its error and return its exit code: 0 if the check passes. Defects are raised."""
        try:
            with required_libraries():
                check()
        except Exception as error:
            code = exit_code(error)
            if code == DEFECT:
                raise
            for line in describe(error).splitlines():
                jobs = self.problems.setdefault((code, line), [])
                jobs += [job] if job not in jobs else []
            return code
        return 0

    def add(self, job: int, run: Run) -> None:
        """Go through all steps of a job that makes artifacts, and record their artifacts and errors."""
        self.check(job, partial(self._take_steps, job, run))
        self.artifacts += [(job, title, artifact) for title, artifact in run.engine_steps.finished]

    def _take_steps(self, job: int, run: Run) -> None:
        evaluation = run.make()
        if not run.config.facts.judges:
            return
        if evaluation.exists:
            verdict = decide(load_report(evaluation.path), load_rows(evaluation.path), run.config.gates)
            self.verdicts[run.label] = verdict
            if all(artifact.exists for _, artifact in run.engine_steps.finished):  # the identity binds every artifact
                run.verdict_steps.identity(evaluation, verdict)
        self.too_few += filter(None, [run.verdict_steps.too_few])
        if job == 1:
            _say_questions(run)

    def add_refusal(self, planned: Plan) -> None:
        """Record the refusal of a command that cannot end in a PASS."""
        jobs = list(range(1, len(planned.jobs) + 1))
        refusal: str | None = None
        if len(self.verdicts) == len(jobs):
            judged = [(label, verdict.status, verdict.checks) for label, verdict in self.verdicts.items()]
            refusal = none_accepted(judged, planned.accepted, sweeping=planned.sweeping)
        elif len(self.too_few) == len(jobs):
            refusal = f"workloads: {self.too_few[0]} (docs/questions.md#my-questions)"
        else:
            for text in dict.fromkeys(self.too_few):
                console.say(console.note(f"some jobs: {text}"))
        if refusal is not None:
            self.problems[EXIT_CODES[GateRefusal], refusal] = jobs


def preview(planned: Plan) -> int:
    """Print what the jobs would make or reuse. Return the exit code of the worst foreseeable failure or gate refusal, or 0."""
    foreseen, store = Preview(), DryStore(planned.jobs[0].artifacts)  # the jobs of a sweep share one work directory
    opened = set[Path]()
    for job, (config, label) in enumerate(zip(planned.jobs, planned.names, strict=True), start=1):
        codes = {foreseen.check(job, check) for check in checks(config, opened)}
        if config.stage == "promote" and codes == {0}:
            foreseen.check(job, partial(promotable, config))
        if not config.facts.makes:
            console.say(f"stage={config.stage} makes no artifacts: only its inputs were checked")
        elif EXIT_CODES[UserError] not in codes:
            number = f"job {job}: " if planned.sweeping else ""
            console.say(console.styled("bold", f"{number}{config.stage} {label}", f" of {config.model.path}"))
            foreseen.add(job, Run(config, label=label, store=store))
    foreseen.add_refusal(planned)
    _print(foreseen, sweeping=planned.sweeping)
    return max((code for code, _ in foreseen.problems), key=SEVERITY.index, default=0)


def _print(foreseen: Preview, *, sweeping: bool) -> None:
    rows, printed = list[list[Value]](), set[str]()
    for job, title, artifact in foreseen.artifacts:
        rows.append([title, job, "reused" if artifact.exists else "made above" if artifact.key in printed else "made"])
        printed.add(artifact.key)
    if rows:
        console.show(Grid("", COLUMNS, rows, {"reused": "dim", "made above": "dim"}))
        counts = Counter(state for *_, state in rows)
        console.say(f"{counts['reused']} reused, {counts['made']} made, later rounds run only if the gates are undecided")
    for label, verdict in foreseen.verdicts.items():
        console.say(f"{label} is judged already: {verdict.status}")
    for (_, line), jobs in foreseen.problems.items():
        console.error(f"job {', '.join(map(str, jobs))}: {line}" if sweeping else line)
    console.say("dry=true: nothing was written")


def _say_questions(run: Run) -> None:
    """Print the number of samples per workload, and the work, memory and time of a verdict with the default engine."""
    from stages.evaluate.inputs.samples import assign_rounds

    workloads, backend = run.config.workloads, run.config.backend
    counts = Counter(sample.workload for sample in run.verdict_steps.samples if not sample.workload.startswith(LONG))
    kinds = [f"{count:,} {name} samples" for name, count in counts.items()]
    documents = f"{workloads.length_documents} documents"
    kinds += [f"{documents} of {length:,} tokens with {LONG_QUESTIONS} questions each" for length in workloads.lengths]
    rounds = assign_rounds(run.verdict_steps.samples, workloads.rounds)
    console.say(f"{', '.join(kinds)} in at most {len(rounds)} round{'s' if len(rounds) > 1 else ''}")
    model = read_model(locate_checkpoint(run.config.model.path))
    if not isinstance(backend, OnnxRuntimeConfig):
        return
    work, shape = verdict_work(rounds, workloads), model.info.shape
    first, whole = work.seconds(model.parameters, shape.layers * model.info.q_heads * shape.head_dim, backend.threads)
    if whole < MIN_SECONDS:
        return
    parts = [f"{tokens - decoded:,.0f} and {decoded:,.0f}" for tokens, decoded, *_ in (work.first, work.whole)]
    console.say(
        f"tokens to prefill and decode, both engines: about {parts[0]} in the first round, {parts[1]} in all rounds; "
        f"the reference engine computes {work.reference[0]:,.0f}"
    )
    console.say(
        f"a verdict on a CPU (backend=onnxruntime, {backend.threads} threads) takes about "
        f"{work.gib(model.parameters, shape):.2g} GiB of memory and, if nothing is reused, {duration(first)} for the first "
        f"round, {duration(whole)} for all rounds (at the rates of a Xeon with AVX-512 and nothing else to do)"
    )
