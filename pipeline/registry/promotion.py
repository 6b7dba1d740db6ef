"""Promotion: which engine serves. Chooses, re-verifies the evidence, moves aliases. Knows no MLflow.

Aliases are `candidate` (registered last), `champion` (serves) and `previous` (what the champion replaced).

A promotion sets `previous` to the present champion first and `champion` second: interrupted in between, the old champion
still serves and promoting again repairs it. A rollback makes `previous` the champion and removes `previous`: it is one step,
and a second rollback (two people, a CI retry) is an error instead of bringing the bad engine back.

MLflow has no compare-and-swap. The lock covers every process on this host that uses the same store (with SQLite) or the same
work directory (with a server); against other hosts there is only the check after the write, which says when it lost.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from filelock import FileLock

from pipeline.artifacts.digest import file_digest, files_digest, tree_files
from pipeline.core.errors import GateRefusal, UserError
from pipeline.registry.summary import Candidate
from pipeline.verdict.report import REPORT_FILE, SAMPLES_FILE, jsonl_lines

PASS = "PASS"

Decide = Callable[[dict[str, Any], list[dict[str, Any]]], tuple[str, Sequence[str]]]
"""(report, sample rows), as read from JSON -> (verdict, reasons): the gates, bound to their thresholds."""


class Registry(Protocol):
    """Versions of one registered model, their tags, and the aliases that point at them."""

    lock: Path

    def alias(self, alias: str) -> str | None: ...
    def set_alias(self, alias: str, version: str) -> None: ...
    def delete_alias(self, alias: str) -> None: ...
    def tags(self, version: str) -> dict[str, str] | None:
        """Tags of a version; None when there is no such version."""
        ...

    def set_tags(self, version: str, tags: Mapping[str, str]) -> None: ...


@dataclass(frozen=True)
class Move:
    """What became of the aliases."""

    champion: str
    """Name of the KV policy that serves now."""
    version: str
    previous: str | None
    """Version that a rollback would bring back."""
    changed: bool
    message: str


ORACLE = "torch"
"""The backend that the others are held to: the same logits up to rounding, written to be read and not to serve."""


def evidence_digest(report: Path, samples: Path) -> str:
    """Digest of a report and its sample rows, as a model version cites them."""
    return files_digest({REPORT_FILE: file_digest(report), SAMPLES_FILE: file_digest(samples)})


def live_tokens(candidate: Candidate) -> float:
    """The objective: most live tokens in the memory budget (`workloads.load`), which is what admission is decided by."""
    tokens = candidate.metrics.get("memory/max_live_tokens")
    return -math.inf if tokens is None else tokens


def choose(candidates: Sequence[Candidate]) -> Candidate:
    """The one with the most live tokens of those that passed, then the lowest mean KL; an oracle only when it is alone in
    that. Raises GateRefusal when none passed."""
    passed = [candidate for candidate in candidates if candidate.verdict == PASS]
    if not passed:
        why = "; ".join(f"{c.name}: {c.verdict}" + (f" ({c.reasons[0]})" if c.reasons else "") for c in candidates)
        raise GateRefusal(f"no candidate passed: {why}" if why else "there is no candidate: run stage=evaluate first")
    return max(passed, key=lambda c: (live_tokens(c), c.backend != ORACLE, -c.metric("quality/kl_mean"), c.name))


def verify(candidate: Candidate, decide: Decide, registry: Registry) -> None:
    """Re-establish the evidence from what is on disk now. Raises GateRefusal with the first thing that is wrong."""

    def require(holds: bool, why: str) -> None:
        if not holds:
            raise GateRefusal(f"{candidate.name} is not promoted: {why}")

    for name, folder, cited in (
        ("engine", candidate.engine_path, candidate.engine_digest),
        ("baseline", candidate.baseline_path, candidate.baseline_digest),
    ):
        require(Path(folder).is_dir(), f"its {name} {folder} is gone; run stage=build again")
        actual = files_digest(tree_files(Path(folder)))
        require(actual == cited, f"the {name} in {folder} has digest {actual[:12]}, the candidate cites {cited[:12]}")

    report_path, samples_path = Path(candidate.report_path), Path(candidate.samples_path)
    for path in (report_path, samples_path):
        require(path.is_file(), f"its evidence {path} is gone; run stage=evaluate again")
    actual, cited = evidence_digest(report_path, samples_path), candidate.report_digest
    require(actual == cited, f"the report in {report_path.parent} has digest {actual[:12]}, the candidate cites {cited[:12]}")
    identity = Path(candidate.identity_path)
    require(identity.is_file(), f"its identity {identity} is gone; run stage=evaluate again")
    require(file_digest(identity) == candidate.identity_digest, f"{identity} is not the identity that the candidate cites")
    report = json.loads(report_path.read_text(encoding="utf-8"))
    require(report.get("engine_digest") == candidate.engine_digest, "its report is about another engine")
    require(report.get("baseline_digest") == candidate.baseline_digest, "its report compares with another baseline")
    rows = [json.loads(line) for line in jsonl_lines(samples_path)]
    verdict, reasons = decide(report, rows)
    require(verdict == PASS, f"decided again from its samples it is {verdict}: {'; '.join(reasons)}")

    require(candidate.model_version is not None, "it is not registered (tracking.enabled=false?)")
    tags = registry.tags(str(candidate.model_version))
    require(tags is not None, f"version {candidate.model_version} is not in the registry")
    for name in ("engine_digest", "baseline_digest", "report_digest", "identity_digest"):
        registered = (tags or {}).get(name, "nothing")
        require(registered == getattr(candidate, name), f"version {candidate.model_version} cites another {name}")


def _moved(registry: Registry, champion: str, previous: str | None) -> None:
    """Read back what was written: another host may have moved the aliases at the same time."""
    found = registry.alias("champion"), registry.alias("previous")
    if found != (champion, previous):
        raise GateRefusal(
            f"another host moved the aliases meanwhile: champion={found[0]} previous={found[1]}, "
            f"expected champion={champion} previous={previous}; look at the registry, then promote again"
        )


def promote(candidates: Sequence[Candidate], registry: Registry, decide: Decide, *, sweep: str) -> Move:
    """Make the best candidate that passed the champion. Raises GateRefusal when none passed or its evidence fails."""
    best = choose(candidates)
    verify(best, decide, registry)
    version = str(best.model_version)
    with FileLock(registry.lock):
        old, previous = registry.alias("champion"), registry.alias("previous")
        if old == version:
            return Move(best.name, version, previous, False, f"{best.name} (version {version}) is the champion already")
        note = ""
        rolled_back = (registry.tags(version) or {}).get("rolled_back_at")
        if rolled_back:
            note = f"; it had been rolled back at {rolled_back}"
        evidence = {
            "promoted_at": _now(),
            "promoted_by_sweep": sweep,
            "promoted_over": old or "",
            "evidence": f"engine {best.engine_digest} baseline {best.baseline_digest} report {best.report_digest}",
        }
        registry.set_tags(version, evidence)
        if old is not None:
            registry.set_alias("previous", old)
        registry.set_alias("champion", version)
        _moved(registry, version, old if old is not None else previous)
    over = f" over version {old}" if old is not None else ""
    return Move(best.name, version, old, True, f"{best.name} (version {version}) is the champion{over}{note}")


def rollback(registry: Registry) -> Move:
    """Bring the previous champion back. Raises UserError when there is none."""
    with FileLock(registry.lock):
        bad, previous = registry.alias("champion"), registry.alias("previous")
        if bad is None or previous is None or previous == bad:
            raise UserError("stage=rollback: there is no previous champion to return to")
        tags = registry.tags(previous)
        if tags is None:
            raise UserError(f"stage=rollback: version {previous}, the previous champion, was deleted from the registry")
        registry.set_alias("champion", previous)
        registry.delete_alias("previous")
        registry.set_tags(bad, {"rolled_back_at": _now()})
        _moved(registry, previous, None)
    name = tags.get("kv", f"version {previous}")
    return Move(name, previous, None, True, f"{name} (version {previous}) is the champion again, version {bad} is not")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
