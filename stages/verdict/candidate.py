"""A judged engine, and the evidence that its promotion cites."""

import math
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from stages.core.files import ARTIFACTS
from stages.core.strict import StrictModel
from stages.verdict.figures import describe_recovery
from stages.verdict.report import SAMPLES_FILE
from stages.verdict.verdict import ALL, Check, Gate, Status, Verdict

CITED = ("engine", "baseline", "report", "identity")


class Cited(StrictModel):
    """A cited file or directory, with its digest when it was cited."""

    path: Path
    digest: str

    def below(self, workdir: Path) -> "Cited":
        """Return the citation with its path inside `workdir`, if the artifact is not at the cited path but is found there."""
        parts = self.path.parts
        if ARTIFACTS not in parts or self.path.exists():
            return self
        inside = workdir.joinpath(*parts[len(parts) - 1 - parts[::-1].index(ARTIFACTS) :])
        return self.model_copy(update={"path": inside}) if inside.exists() else self


class Candidate(StrictModel):
    name: str
    """Display name, unique within a sweep: the policy, then the candidate's other overrides."""
    policy: str
    model: str
    backend: str
    verdict: Status
    reasons: tuple[str, ...]
    covered: str | None = None
    """Limits of the verdict: `up to 1,024 tokens, batch 16`."""
    checks: tuple[Check, ...] = ()
    """All lines of the verdict, including the lines of context bins."""
    warnings: tuple[str, ...] = ()
    """Reasons of the checks with a WARNING, which do not affect the verdict."""
    samples_needed: int = 0
    """Number of samples that would decide the next attempt if the rates stay the same; 0 if no number is known."""
    metrics: Mapping[str, float]
    """Finite metrics by name, grouped by prefix: quality/, noise/, perf/, memory/, baseline/."""
    engine: Cited
    baseline: Cited
    report: Cited
    """report.json. samples.jsonl is in the same folder; the digest covers both files."""
    identity: Cited
    """identity.json. The evidence that a replay reads is in the same folder."""
    checkpoint: str | None = None
    """Digest of the checkpoint."""
    run_id: str = ""
    """Id of the MLflow run that judged the engine; "" if the engine is not registered."""
    version: str = ""
    """Number of the model version; "" if the engine is not registered."""

    def __repr__(self) -> str:
        return f"Candidate({self.name} of {self.model}: {self.verdict})"

    def below(self, workdir: Path) -> "Candidate":
        """Return the candidate with corrected paths, if its work directory was moved to `workdir`."""
        return self.model_copy(update={name: getattr(self, name).below(workdir) for name in CITED})

    @staticmethod
    def decided(verdict: Verdict) -> dict[str, Any]:
        """Return the fields that a verdict sets, as keyword arguments."""
        return {
            "verdict": verdict.status,
            "reasons": tuple(verdict.reasons),
            "covered": verdict.covered,
            "checks": tuple(verdict.checks),
            "warnings": tuple(verdict.warnings),
            "samples_needed": verdict.samples_needed,
        }

    @property
    def recovery(self) -> Check | None:
        """The line on recovery over all questions; None if no question has an answer."""
        return next((check for check in self.checks if (check.gate, check.where) == (Gate.RECOVERY, ALL)), None)

    @property
    def kept(self) -> str | None:
        """The recovery with its bound, as a clause; None if it is unknown."""
        line = self.recovery
        if line is None or line.value is None or line.bound is None:
            return None
        return describe_recovery(line.value, line.bound, line.status)

    @property
    def caveat(self) -> str | None:
        """The share of ruined requests that a PASS leaves open, as a clause; None if it is within the gate's limit."""
        ruined = [check for check in self.checks if check.gate == Gate.RUINED]
        open_shares = [line.bound for line in ruined if line.bound is not None and line.bound > (line.threshold or 0.0)]
        parts = [f"with so few documents, up to {100 * share:.2g} % of requests may be ruined" for share in open_shares]
        return "; ".join(parts) or None if self.verdict == "PASS" else None

    @property
    def figures(self) -> list[str]:
        """Clauses on recovery, right answers, distance from FP16 and memory; unknown figures are left out."""
        baseline, accuracy = (self.metrics.get(f"quality/accuracy_{engine}") for engine in ("baseline", "candidate"))
        kl, kib = self.metrics.get("quality/kl_mean"), self.metrics.get("memory/kib_per_token")
        figures = [
            self.kept,
            None if baseline is None or accuracy is None else f"right answers {accuracy:.3f}, of FP16 {baseline:.3f}",
            None if kl is None else f"mean KL {kl:.1e}",
            "memory unknown" if kib is None else f"{kib:.3f} KiB/token",
        ]
        return [text for text in figures if text]

    @property
    def samples(self) -> Path:
        return self.report.path.with_name(SAMPLES_FILE)

    @property
    def citations(self) -> dict[str, str]:
        """Digests of the evidence. The keys are tags of the candidate's run."""
        return {f"{name}_digest": getattr(self, name).digest for name in CITED}

    def metric(self, name: str) -> float:
        """Return a metric for comparisons; infinity if it is missing, so that it never wins."""
        return self.metrics.get(name, math.inf)


def is_blind(checks: Sequence[Check]) -> bool:
    """Return whether no gate noticed the must-fail control's corrupted scales. Such a verdict does not depend on the cache."""
    return any(check.gate == Gate.MUST_FAIL_CONTROL and check.status == "FAIL" for check in checks)


def none_accepted(
    judged: Sequence[tuple[str, Status, Sequence[Check]]], accepted: Set[Status], *, sweeping: bool
) -> str | None:
    """Return why the verdicts of a command, (name, status, checks) each, end it with a refusal; None if one is accepted."""
    if not judged or any(status in accepted for _, status, _ in judged):
        return None
    return "no candidate of the sweep passed" if sweeping else not_passed(*judged[0])


def not_passed(name: str, verdict: Status, checks: Sequence[Check]) -> str:
    """Return why a candidate did not pass: `int4 does not compute its policy: FAIL`."""
    problem = "is not good enough" if verdict == "FAIL" else "is not decided"
    engines = {check.where for check in checks if check.gate in (Gate.CONFORMANCE, Gate.STRESS_TEST) and check.status == "FAIL"}
    if engines:
        problem = (
            "does not compute its policy"
            if "candidate" in engines
            else "cannot be compared, because the FP16 baseline deviates from the reference engine"
        )
    if is_blind(checks):
        problem = "gives answers that do not depend on the cache"
    return f"{name} {problem}: {verdict}"
