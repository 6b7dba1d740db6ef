"""`summary.json` at the top of the work directory: CI reads it, and promotion chooses from its candidates."""

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, Literal

from pydantic import ConfigDict, ValidationError

from pipeline.artifacts.digest import file_digest, files_digest
from pipeline.artifacts.locks import locked
from pipeline.core.errors import SEVERITY, UserError
from pipeline.core.strict import StrictModel
from pipeline.verdict.report import REPORT_FILE, SAMPLES_FILE
from pipeline.verdict.thresholds import Status

FILE = "summary.json"

SCHEMA_VERSION: Final = 1


class Cited(StrictModel):
    """A file or directory, and the digest that it had when it was cited."""

    path: Path
    """Absolute path."""
    digest: str


class Registration(StrictModel):
    """Where a candidate is tracked and registered."""

    run_id: str
    """Id of the MLflow run of its evaluation."""
    model_version: str
    """Its version of the registered model."""


class Candidate(StrictModel):
    """An engine that was judged, and the evidence that its promotion cites."""

    model_config = ConfigDict(allow_inf_nan=True)  # of metrics; JSON has null for them

    name: str
    """Display name, unique within a sweep: the policy, and what else the command line changed."""
    policy: str
    model: str
    """The checkpoint's short name."""
    backend: str
    verdict: Status
    reasons: tuple[str, ...]
    covered: str | None = None
    """How far the verdict holds: `up to 1,024 tokens, batch 16`."""
    metrics: Mapping[str, float | None]
    """By name, grouped by prefix: quality/, noise/, perf/, memory/, baseline/. A value that was not finite is null in JSON."""
    engine: Cited
    """The bundle's directory."""
    baseline: Cited
    """The directory of the FP16-KV engine's bundle."""
    report: Cited
    """report.json; samples.jsonl lies beside it, and the digest covers both (`evidence_digest`)."""
    identity: Cited
    """identity.json; the evidence that a replay reads lies beside it."""
    registration: Registration | None = None
    """None without tracking."""

    @property
    def samples(self) -> Path:
        """Path of the report's samples.jsonl."""
        return self.report.path.with_name(SAMPLES_FILE)

    @property
    def citations(self) -> dict[str, str]:
        """Digests by the names of the tags under which a model version cites them."""
        return {
            "engine_digest": self.engine.digest,
            "baseline_digest": self.baseline.digest,
            "report_digest": self.report.digest,
            "identity_digest": self.identity.digest,
        }

    def metric(self, name: str) -> float:
        """Return a metric for comparisons: inf when it is missing or not finite, so that it never wins."""
        value = self.metrics.get(name)
        return math.inf if value is None or not math.isfinite(value) else value


class Summary(StrictModel):
    """The candidates of the last sweep, in the order in which they came."""

    schema_version: Literal[1]
    sweep: str = ""
    candidates: tuple[Candidate, ...] = ()
    champion: str | None = None
    """Name of the candidate that serves, once a promotion or a rollback chose it."""
    exit_code: int = 0


def evidence_digest(report: Path) -> str:
    """Return the digest of a report and the samples.jsonl beside it, as a model version cites them."""
    return files_digest({REPORT_FILE: file_digest(report), SAMPLES_FILE: file_digest(report.with_name(SAMPLES_FILE))})


def load(workdir: Path) -> Summary:
    """Return the summary of a work directory, an empty one when there is none.

    Raises:
        UserError: when the file is damaged, or an older kvgate wrote it.
    """
    try:
        content = (workdir / FILE).read_bytes()
    except FileNotFoundError:
        return Summary(schema_version=SCHEMA_VERSION)
    try:
        return Summary.model_validate_json(content)
    except ValidationError as error:
        problem = _version_problem(content)
        if problem is None:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            detail = f"{place}: {first['msg']}" if place else first["msg"]
            problem = f"is damaged ({detail}); remove it and evaluate again"
        raise UserError(f"workdir={workdir}: {FILE} {problem}") from error


def _version_problem(content: bytes) -> str | None:
    """Return what to do about a summary of another kvgate; None when `content` is no such summary."""
    try:
        summary = json.loads(content)
    except (ValueError, RecursionError):
        return None
    if not isinstance(summary, dict) or "candidates" not in summary:
        return None
    version = summary.get("schema_version")
    if version is None:
        return "was written by an older kvgate; remove it and evaluate again"
    if type(version) is int and version > SCHEMA_VERSION:
        return f"was written by a newer kvgate (schema_version {version}); use that one, or another workdir"
    return None


def _write(workdir: Path, summary: Summary) -> None:
    scratch = workdir / f".{FILE}.{os.getpid()}"
    scratch.write_text(summary.model_dump_json(indent=2) + "\n", encoding="utf-8")
    scratch.replace(workdir / FILE)


def _update(workdir: Path, change: Callable[[Summary], Summary]) -> Summary:
    workdir.mkdir(parents=True, exist_ok=True)
    with locked(workdir / f".{FILE}.lock", FILE):
        summary = change(load(workdir))
        _write(workdir, summary)
    return summary


def _of_sweep(summary: Summary, sweep: str) -> Summary:
    """Return the summary if it is this sweep's, else a fresh one."""
    return summary if summary.sweep == sweep else Summary(schema_version=SCHEMA_VERSION, sweep=sweep)


def record(workdir: Path, sweep: str, candidate: Candidate) -> Summary:
    """Add a judged candidate to the summary.

    It replaces the candidate of the same model and name. The first candidate of another sweep starts a fresh list.
    """

    def change(old: Summary) -> Summary:
        old = _of_sweep(old, sweep)
        candidates = {(known.model, known.name): known for known in old.candidates}
        candidates[candidate.model, candidate.name] = candidate
        return old.model_copy(update={"candidates": tuple(candidates.values())})

    return _update(workdir, change)


def finish(workdir: Path, sweep: str | None, exit_code: int) -> Summary:
    """Note how a job ended; a sweep's exit code is the worst of its jobs'.

    Args:
        workdir: The work directory.
        sweep: The job's sweep; None when the job worked on the candidates of the last one, and its code replaces the sweep's.
        exit_code: The job's.
    """

    def change(old: Summary) -> Summary:
        if sweep is None:
            return old.model_copy(update={"exit_code": exit_code})
        old = _of_sweep(old, sweep)
        return old.model_copy(update={"exit_code": max(old.exit_code, exit_code, key=SEVERITY.index)})

    return _update(workdir, change)


def conclude(workdir: Path, champion: str) -> Summary:
    """Note which candidate serves now."""
    return _update(workdir, lambda old: old.model_copy(update={"champion": champion}))
