"""The records of faults, a JSON file each: what they cost, and what came of judging them. An interrupted run goes on there."""

import json
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter

HERE = Path(__file__).parent
RESULTS, COSTS = HERE / "results.json", HERE / "costs.json"


class Cost(BaseModel):
    """What a fault costs in a day of service (`faults.drill`), beside the same engine without it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    worst_kl: float
    """The largest KL of a token from the sound engine, in nats; 1e9 for what is not finite."""
    rows: float
    """Share of the tokens that differ."""
    changed: int
    """Tokens that a greedy user gets otherwise."""
    error: str = ""
    """The error that ended the day."""
    key: str = ""
    """Digest of all that decides it: another key is stale."""

    @property
    def real(self) -> bool:
        """Whether a user gets something else: more than arithmetic could differ by, the probe's own least distance."""
        return bool(self.error) or self.worst_kl >= 1e-6 or self.changed > 0


class Outcome(BaseModel):
    """What came of one engine."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    verdict: str
    """PASS, FAIL or INCONCLUSIVE of the smallest evaluation that may pass; ERROR where an evaluation ended with an error."""
    gates: dict[str, str]
    """Every gate that failed the engine -> where, and what it saw."""
    default: str = ""
    """The verdict of the default evaluation, where the gates that ask no sample did not see it and samples might."""
    probe: Literal["small", "default"] = "small"
    """The probe that it took: the small one comes first."""
    samples: int
    mean_kl: float | None
    """Mean KL from the baseline, nats per token."""
    seconds: float
    """Of the processor."""
    key: str
    """Digest of all that decides it: an outcome with another key is stale."""
    commit: str
    """The commit that was checked out when it was judged."""

    @property
    def caught(self) -> bool:
        """Whether both evaluations refuse the engine, and not for want of samples."""
        return {self.verdict, self.default or self.verdict} <= {"FAIL", "ERROR"}


Outcomes = dict[str, Outcome]
Costs = dict[str, Cost]
"""By the fault's name; the outcomes of sound engines have names of their own (`faults.library`)."""

M = TypeVar("M", bound=BaseModel)


def load(path: Path, model: type[M]) -> dict[str, M]:
    """Read a record; an absent one is empty."""
    return TypeAdapter(dict[str, model]).validate_json(path.read_bytes()) if path.exists() else {}  # type: ignore[valid-type]


def save(path: Path, found: dict[str, M]) -> None:
    """Write a record, in the order in which it was made."""
    text = json.dumps({name: one.model_dump() for name, one in found.items()}, indent=1)
    path.write_text(text + "\n", encoding="utf-8")
