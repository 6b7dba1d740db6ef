"""The records of faults in JSON files: their costs and their outcomes. An interrupted run resumes from the records."""

import json
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter

HERE = Path(__file__).parent
RESULTS, COSTS = HERE / "results.json", HERE / "costs.json"


class Cost(BaseModel):
    """Cost of a fault: a service (`faults.service`) compared with the same engine without the fault."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    worst_kl: float
    """Largest KL of a token from the sound engine, in nats; 1e9 if not finite."""
    rows: float
    """Share of the tokens whose logits differ."""
    changed: int
    """Number of tokens that greedy decoding chooses differently."""
    error: str = ""
    """The error that ended the service."""
    key: str = ""
    """Digest of everything that determines the cost. If it differs, the cost is stale."""

    @property
    def real(self) -> bool:
        """Whether a user notices: an error, a changed token, or a KL of at least 1e-6.

        Rounding errors do not reach 1e-6.
        """
        return bool(self.error) or self.worst_kl >= 1e-6 or self.changed > 0


class Outcome(BaseModel):
    """Result of judging one engine."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    verdict: str
    """Verdict of the small evaluation: PASS, FAIL, INCONCLUSIVE, or ERROR if an evaluation raised."""
    gates: dict[str, str]
    """Gate that failed the engine -> reason."""
    default: str = ""
    """Verdict of the default evaluation, run only if the gates that use no samples found nothing."""
    stress_test: Literal["small", "default"] = "small"
    """The stress test used; the small one runs first."""
    samples: int
    mean_kl: float | None
    """Mean KL from the baseline, in nats per token."""
    seconds: float
    """CPU time in seconds."""
    key: str
    """Digest of everything that determines the outcome. If it differs, the outcome is stale."""
    commit: str
    """The commit that was checked out for the evaluation."""

    @property
    def caught(self) -> bool:
        """Whether every evaluation that ran ended in FAIL or ERROR, not INCONCLUSIVE."""
        return {self.verdict, self.default or self.verdict} <= {"FAIL", "ERROR"}


Outcomes = dict[str, Outcome]
Costs = dict[str, Cost]
"""Records by the fault's name; sound engines have their own names (`faults.library.sound_name`)."""

M = TypeVar("M", bound=BaseModel)


def load(path: Path, model: type[M]) -> dict[str, M]:
    """Read a record; return an empty one if the file does not exist."""
    return TypeAdapter(dict[str, model]).validate_json(path.read_bytes()) if path.exists() else {}  # type: ignore[valid-type]


def save(path: Path, entries: dict[str, M]) -> None:
    """Write a record in insertion order."""
    text = json.dumps({name: entry.model_dump() for name, entry in entries.items()}, indent=1)
    path.write_text(text + "\n", encoding="utf-8")
