"""The findings of a replay of evidence, and the refusals that follow from them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from stages.core.errors import GateRefusal, MissingRequirement


@dataclass(frozen=True)
class Finding:
    """One line of a replay of evidence: the checked part, and how it compares with the record."""

    name: str
    status: Literal["same", "differs", "missing"]
    detail: str

    def __str__(self) -> str:
        return f"{self.name}: {self.status}, {self.detail}"


def first_refusal(findings: Sequence[Finding]) -> GateRefusal | MissingRequirement | None:
    """Return the refusal for the first part that differs, or else for the first missing part; None if all are the same."""
    for status, refusal in (("differs", GateRefusal), ("missing", MissingRequirement)):
        for finding in findings:
            if finding.status == status:
                return refusal(str(finding))
    return None
