"""`summary.json` at the top of the work directory: what CI reads, and what promotion chooses from."""

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

from filelock import FileLock

from pipeline.core.errors import SEVERITY, UserError

FILE = "summary.json"


@dataclass(frozen=True)
class Candidate:
    """An engine that was judged, with all that its promotion has to cite. Paths are absolute."""

    kv: str
    verdict: str
    """PASS, FAIL or INCONCLUSIVE."""
    reasons: tuple[str, ...]
    kib_per_token: float
    metrics: Mapping[str, float | None]
    """Names grouped by prefix: quality/, noise/, perf/, memory/, baseline/."""
    engine_digest: str
    baseline_digest: str
    report_digest: str
    """Of report.json and samples.jsonl together (`pipeline.registry.promotion.evidence_digest`)."""
    engine_path: str
    baseline_path: str
    report_path: str
    samples_path: str
    identity_digest: str = ""
    """Of identity.json; empty in a summary that an older kvgate wrote."""
    identity_path: str = ""
    label: str = ""
    """The policy, and what else the command line changed; empty when that is only the policy."""
    model: str = ""
    backend: str = "onnxruntime"
    run_id: str | None = None
    model_version: str | None = None

    @property
    def name(self) -> str:
        """What tells it from the other candidates of its sweep."""
        return self.label or self.kv

    def metric(self, name: str) -> float:
        """A metric for comparing: inf when it is missing or not a number, so that it never wins."""
        value = self.metrics.get(name)
        return math.inf if value is None or not math.isfinite(value) else value


@dataclass(frozen=True)
class Summary:
    """The candidates of the last sweep, in the order in which they came."""

    sweep: str = ""
    candidates: tuple[Candidate, ...] = field(default=())
    champion: str | None = None
    exit_code: int = 0


def _plain(value: object) -> object:
    """JSON-like, with non-finite numbers as None: strict parsers refuse NaN."""
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _candidate(raw: Mapping[str, object]) -> Candidate:
    known = {f.name for f in fields(Candidate)}
    values = {name: value for name, value in raw.items() if name in known}
    reasons = values.get("reasons")
    kib = values.get("kib_per_token")
    values["reasons"] = tuple(reasons) if isinstance(reasons, list) else ()
    values["kib_per_token"] = math.nan if kib is None else kib
    return Candidate(**values)  # type: ignore[arg-type]


def load(workdir: Path) -> Summary:
    """The summary of `workdir`, empty when there is none. Raises UserError when the file is damaged."""
    path = workdir / FILE
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        candidates = tuple(_candidate(candidate) for candidate in raw["candidates"])
        return Summary(raw["sweep"], candidates, raw["champion"], raw["exit_code"])
    except FileNotFoundError:
        return Summary()
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"workdir={workdir}: {FILE} is damaged ({error}); remove it and evaluate again") from error


def _write(workdir: Path, summary: Summary) -> None:
    text = json.dumps(_plain(asdict(summary)), indent=2, allow_nan=False, ensure_ascii=False)
    scratch = workdir / f".{FILE}.{os.getpid()}"
    scratch.write_text(text + "\n", encoding="utf-8")
    scratch.replace(workdir / FILE)


def _update(workdir: Path, change: Callable[[Summary], Summary]) -> Summary:
    workdir.mkdir(parents=True, exist_ok=True)
    with FileLock(workdir / f".{FILE}.lock"):
        summary = change(load(workdir))
        _write(workdir, summary)
    return summary


def _of_sweep(summary: Summary, sweep: str) -> Summary:
    """The summary if it is this sweep's, else a fresh one."""
    return summary if summary.sweep == sweep else Summary(sweep=sweep)


def record(workdir: Path, sweep: str, candidate: Candidate) -> Summary:
    """Add a judged candidate: it replaces its namesake of the same model and sweep; another sweep starts a fresh list."""

    def change(old: Summary) -> Summary:
        old = _of_sweep(old, sweep)
        candidates = {(known.model, known.name): known for known in old.candidates}
        candidates[candidate.model, candidate.name] = candidate
        return replace(old, candidates=tuple(candidates.values()))

    return _update(workdir, change)


def finish(workdir: Path, sweep: str | None, exit_code: int) -> Summary:
    """Note how a job ended; a sweep's code is the worst of its jobs'. Without `sweep` the job worked on the last one."""

    def change(old: Summary) -> Summary:
        if sweep is None:
            return replace(old, exit_code=exit_code)
        old = _of_sweep(old, sweep)
        return replace(old, exit_code=max(old.exit_code, exit_code, key=SEVERITY.index))

    return _update(workdir, change)


def conclude(workdir: Path, champion: str) -> Summary:
    """Write which candidate serves now."""
    return _update(workdir, lambda old: replace(old, champion=champion))
