"""`dry=true`: what each job of a command line would make or reuse, and what it would fail on. Nothing is written.

The chain of artifacts runs over a store that makes nothing: what is there is found, what is not is stood in for (`StandIn`).

The key of an artifact holds the digests of its inputs, which nobody knows before the inputs are made. A stand-in's digests are
words in their place, the same words wherever the same recipe is met again: the second job of a sweep reuses artifacts of the
first one.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from statistics import median

from rich.markup import escape

from pipeline.artifacts.backend import Fill
from pipeline.artifacts.digest import json_digest
from pipeline.artifacts.store import Artifact, Recipe, Store
from pipeline.checkpoint.places import locate_checkpoint
from pipeline.config.compose import Plan
from pipeline.config.config import JUDGING, MAKING, Config
from pipeline.config.suiting import has_chat_template
from pipeline.core.errors import DEFECT, EXIT_CODES, SEVERITY, GateRefusal, UserError, describe, exit_code
from pipeline.core.kv import KVShape
from pipeline.gguf.model import inspect_gguf
from pipeline.loading import open_backend, required_libraries
from pipeline.planning.shapes import read_model
from pipeline.registry.promotion import PASS
from pipeline.registry.reaching import check_reachable
from pipeline.registry.summary import not_passed
from pipeline.registry.tracking import locate
from pipeline.run.chain import Chain
from pipeline.run.inputs import TRACKED, checks
from pipeline.run.tuning import search
from pipeline.terminal import console
from pipeline.terminal.grids import Column, Grid, Row
from pipeline.terminal.tables import verdict_lines
from pipeline.verdict.gates import decide
from pipeline.verdict.report import load_report, load_rows
from pipeline.verdict.thresholds import Verdict

COLUMNS = Column("job", "job"), Column("is", "is", words=True), Column("seconds", "time\n(s)", ",.1f")


class _Words(dict[str, str]):
    """The files and folders of an artifact that is not there: each has a word in place of its digest."""

    def __init__(self, key: str) -> None:
        super().__init__()
        self._key = key

    def __missing__(self, name: str) -> str:
        return json_digest([self._key, name])


class StandIn(Artifact):
    """Stands in for an artifact that is not in the store."""

    def digest_under(self, folder: str) -> str:
        return self.files[folder]


def is_there(*artifacts: Artifact) -> bool:
    return not any(isinstance(artifact, StandIn) for artifact in artifacts)


class DryStore(Store):
    """A store from which nothing is made: `get` returns an artifact that is there and intact, else a stand-in."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.job = 1
        """Number of the job that asks."""
        self.maker: dict[str, int] = {}
        """Key of a stand-in -> the first job that asks for it."""

    def get(self, recipe: Recipe, fill: Callable[[Path], None], *, resumable: bool = False) -> Artifact:  # noqa: ARG002
        found = self.verified(recipe)
        if found is not None:
            return found
        self.maker.setdefault(recipe.key, self.job)
        path, key = self.path(recipe), recipe.key
        return StandIn(path, recipe.stage, key, key, _Words(key), recipe.parts, False, 0.0)


class DryChain(Chain):
    """The artifacts of one configuration, as far as they are known before they are made."""

    store: DryStore
    verdict: Verdict | None = None

    def ask(self) -> None:
        """Ask for all that the configured stage makes; the identity only where it is known of what."""
        if self.config.stage == "tune":
            search(self)
            return
        made = self.made_by(self.config.stage)
        if self.config.stage in JUDGING and is_there(made[0]):
            report, rows = load_report(made[0].path), load_rows(made[0].path)
            self.verdict = decide(report, rows, self.config.gates)
            if is_there(*(artifact for _, artifact in self.finished)):
                self.identity(made, report, self.verdict)

    @cached_property
    def checkpoint_digest(self) -> str:
        return super().checkpoint_digest if self.checkpoint.is_dir() else self.finished[0][1].digest

    @property
    def shape(self) -> KVShape:
        if self.checkpoint.is_dir():
            return super().shape
        return inspect_gguf(locate_checkpoint(self.config.model.path)).info.shape

    @cached_property
    def _rounds(self) -> int:
        """How many rounds there are, also of samples that nobody encoded yet."""
        if is_there(self.encoded_samples):
            return super()._rounds
        from stages.evaluate.inputs.rounds import assign_rounds

        return len(assign_rounds(self._samples, self.config.workloads.rounds))

    def _note_length(self) -> None:
        if is_there(self.encoded_samples):
            super()._note_length()

    def _require_able(self, answers: Artifact) -> None:
        if is_there(answers):
            super()._require_able(answers)

    def _is_decided(self, made: Mapping[str, Artifact]) -> bool:
        """Whether the gates want no further round: after rounds that are not there, every round may be wanted."""
        return is_there(*made.values()) and super()._is_decided(made)

    def _get(self, recipe: Recipe, fill: Fill, title: str, resumable: bool) -> Artifact:  # noqa: ARG002
        return self.store.get(recipe, lambda _: None)


@dataclass
class Problems:
    found: dict[tuple[int, str], list[int]] = field(default_factory=dict)
    """Exit code and line -> the jobs that have it."""

    def look(self, job: int, check: Callable[[], object]) -> int:
        """Note what a check raises, and return its exit code, 0 where it raises nothing. A defect of ours is raised."""
        try:
            with required_libraries():
                check()
        except Exception as error:
            code = exit_code(error)
            if code == DEFECT:
                raise
            for line in describe(error).splitlines():
                jobs = self.found.setdefault((code, line), [])
                jobs += [job] if job not in jobs else []
            return code
        return 0

    def report(self, sweeping: bool) -> int:
        for (_, line), jobs in self.found.items():
            where = f"job {', '.join(map(str, jobs))}: " if sweeping else ""
            console.error(f"{where}{line}")
        return max((code for code, _ in self.found), key=SEVERITY.index, default=0)


def foretell(planned: Plan) -> int:
    """Print what the jobs would make, reuse and fail on.

    Return the exit code that is certain: 0 where nothing is known to fail and no gate is known to say no.
    """
    problems, rows, verdicts = Problems(), list[Row](), dict[str, Verdict]()
    store, opened = DryStore(planned.jobs[0].work / "artifacts"), set[Path]()  # a sweep has one work directory
    for store.job, (config, label) in enumerate(zip(planned.jobs, planned.names, strict=True), start=1):
        codes = {problems.look(store.job, check) for check in (*checks(config, opened), *_checks_ahead(config))}
        if config.stage not in MAKING:
            console.say(f"stage={config.stage} makes no artifacts: only what it needs was looked at")
        elif EXIT_CODES[UserError] not in codes:
            number = f"job {store.job}: " if planned.sweeping else ""
            console.say(f"{number}[bold]{config.stage} {escape(label)}[/] of {escape(config.model.path)}")
            chain = DryChain(config, store)
            problems.look(store.job, chain.ask)
            if config.stage in JUDGING and store.job == 1:
                problems.look(store.job, partial(_say_questions, config))
            rows += _rows(chain)
            if chain.verdict is not None:
                verdicts[label] = chain.verdict
    if rows:
        _print(rows)
    for label, verdict in verdicts.items():
        console.say(f"{escape(label)} is judged already: {verdict.status}")
    if len(verdicts) == len(planned.jobs) and PASS not in [verdict.status for verdict in verdicts.values()]:
        (label, verdict), *_ = verdicts.items()
        no = "no candidate of the sweep passed" if planned.sweeping else not_passed(label, verdict.status, verdict.checks)
        problems.found[EXIT_CODES[GateRefusal], no] = list(range(1, len(planned.jobs) + 1))
    code = problems.report(planned.sweeping)
    console.say("dry=true: nothing was written")
    return code


def _checks_ahead(config: Config) -> Iterator[Callable[[], object]]:
    """Yield the checks of what a job meets after its inputs: a GPU that is not here, a tracking store that does not open."""
    if config.stage in JUDGING:
        yield open_backend(config.backend).check_runs
    if config.stage in MAKING and config.quantize.device == "cuda":
        yield _check_device
    if config.tracking.enabled and config.stage in TRACKED:
        yield lambda: _check_tracking(config)


def _check_device() -> None:
    from stages.quantize.run import resolve_device

    resolve_device("cuda")


def _check_tracking(config: Config) -> None:
    location = locate(config.tracking, config.work, config.model.label)
    if location.file is None or location.file.is_file():
        check_reachable(location)


def _rows(chain: DryChain) -> Iterator[Row]:
    job = chain.store.job
    for title, artifact in chain.finished:
        maker = chain.store.maker.get(artifact.key, job)
        if is_there(artifact) or maker != job:
            word = "reused" if is_there(artifact) else f"made by job {maker}"
            yield Row(title, (job, word, ""), style="dim")
        else:
            took = [manifest["seconds"] for _, manifest in chain.store.manifests(artifact.stage)]
            yield Row(title, (job, "made", median(took) if took else None))


def _print(rows: list[Row]) -> None:
    console.show("dry", Grid("", "artifact", COLUMNS, rows))
    times = [row.values[2] for row in rows if row.values[1] == "made"]
    known = [seconds for seconds in times if isinstance(seconds, float)]
    console.say(f"{len(rows) - len(times)} reused, {len(times)} made, rounds of samples only as far as the gates want them")
    if known:
        rest = f"; nothing tells of {len(times) - len(known)}" if len(known) < len(times) else ""
        console.say(f"time: {sum(known):,.0f} s, each the median of earlier artifacts of its stage here{rest}")


def _say_questions(config: Config) -> None:
    """Print what the engines are asked, and what a verdict of the embedded engine takes."""
    workloads, path = config.workloads, locate_checkpoint(config.model.path)
    kinds = [f"{count} of {name}" for name, count in workloads.samples.items() if count]
    kinds += [f"those of {workloads.jsonl}"] if workloads.jsonl is not None else []
    kinds += [f"{workloads.gsm8k} of gsm8k"] if workloads.gsm8k else []
    kinds += [f"{workloads.bfcl.samples} each of {', '.join(workloads.bfcl.categories)}"] if workloads.bfcl is not None else []
    said = f"asks {', '.join(kinds)}, in {len(workloads.rounds)} rounds at most"
    console.say(escape(said + ("" if has_chat_template(path) else ", as few-shot text: the tokenizer has no chat template")))
    parameters = read_model(path).parameters
    for line in verdict_lines(parameters) if parameters is not None and config.backend.name == "onnxruntime" else ():
        console.say(line)
