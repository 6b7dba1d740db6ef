"""Shared by the workloads: the slot of a sample with its random generator, messages, JSON answers and word lists."""

import json
import random
from dataclasses import dataclass
from typing import Literal

Split = Literal["train", "calibration", "evaluation"]
Role = Literal["system", "user", "assistant"]
Message = tuple[str, str]
"""(role, content); see `Role`."""


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
        """Return this sample's random generator, seeded with the text of split, workload, seed and index.

        A `name` replaces the workload in this text, so that samples of all workloads with the same index draw the same numbers.
        """
        return random.Random(f"{self.split}:{name or self.workload}:{self.seed}:{self.index}")


def compact_json(value: object) -> str:
    """Return JSON without spaces, the format of all reference answers."""
    return json.dumps(value, separators=(",", ":"))


def words(text: str) -> list[str]:
    return text.split()


DAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
