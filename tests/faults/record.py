"""The record of judged faults: one JSON file, from which the page is made and from which an interrupted run goes on."""

import json
from pathlib import Path

from pydantic import BaseModel, ConfigDict

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"


class Outcome(BaseModel):
    """What came of one engine."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    verdict: str
    """PASS, FAIL or INCONCLUSIVE; ERROR where the evaluation ended with an error."""
    gates: dict[str, str]
    """Every gate that failed the engine -> where, and what it saw."""
    samples: int
    mean_kl: float | None
    """Mean KL from the baseline, nats per token."""
    ladder: str = ""
    """Which small faults of the must-fail control's ladder the gates noticed in the same engine."""
    seconds: float
    key: str
    """Digest of all that decides it: an outcome with another key is stale."""
    commit: str
    """The commit that was checked out when it was judged; the one that has its record where that was not noted."""

    @property
    def caught(self) -> bool:
        """Whether the engine was refused, and not for want of samples."""
        return self.verdict in ("FAIL", "ERROR")


Outcomes = dict[str, Outcome]
"""By the fault's name; `sound POLICY ENGINE` without one."""


def load(path: Path) -> Outcomes:
    """Read a record; an absent one is empty."""
    if not path.exists():
        return {}
    return {name: Outcome.model_validate(one) for name, one in json.loads(path.read_text(encoding="utf-8")).items()}


def save(path: Path, outcomes: Outcomes) -> None:
    """Write a record, in the order of the library."""
    text = json.dumps({name: outcome.model_dump() for name, outcome in outcomes.items()}, indent=1)
    path.write_text(text + "\n", encoding="utf-8")
