"""Types and functions that workloads share: sample slots with their random generators, messages, JSON answers, word lists."""

import json
import random
from dataclasses import dataclass
from typing import Literal

Split = Literal["train", "calibration", "evaluation"]
Message = tuple[str, str]
"""(role, content); roles are "system", "user" and "assistant"."""


@dataclass(frozen=True)
class Slot:
    """Identity of a generated sample: split, workload, seed, and index in the sequence."""

    split: Split
    workload: str
    seed: int
    index: int

    @property
    def id(self) -> str:
        return f"{self.workload}-{self.index:04d}"

    def rng(self, name: str = "") -> random.Random:
        """Return this sample's random generator, or with `name` a generator that all workloads share for this index.

        Its seed is a text of split, workload (or `name`), seed and index, so that different samples never share a generator.
        """
        return random.Random(f"{self.split}:{name or self.workload}:{self.seed}:{self.index}")


def compact_json(value: object) -> str:
    """Return JSON without spaces, the format of all reference answers."""
    return json.dumps(value, separators=(",", ":"))


def words(text: str) -> list[str]:
    """Split a text into its words."""
    return text.split()


DAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
