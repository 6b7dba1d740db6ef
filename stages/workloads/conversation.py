"""What workloads share: which sample it is, messages with known answers of the assistant, answers in JSON, lists of words."""

import json
import random
from dataclasses import dataclass
from typing import Literal

Split = Literal["train", "calibration", "evaluation"]
Message = tuple[str, str]
"""(role, content); roles are "system", "user" and "assistant"."""


@dataclass(frozen=True)
class Slot:
    """Which sample of which sequence is generated."""

    split: Split
    workload: str
    seed: int
    index: int

    @property
    def id(self) -> str:
        return f"{self.workload}-{self.index:04d}"

    def rng(self, name: str = "") -> random.Random:
        """Return the generator of this sample, or of what all samples of this index share under `name`.

        Its seed is a text, which keeps splits, workloads and samples apart.
        """
        return random.Random(f"{self.split}:{name or self.workload}:{self.seed}:{self.index}")


def compact_json(value: object) -> str:
    """Return JSON without spaces, which is how every reference answer is written."""
    return json.dumps(value, separators=(",", ":"))


def words(text: str) -> list[str]:
    """Split a text into its words."""
    return text.split()


DAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
