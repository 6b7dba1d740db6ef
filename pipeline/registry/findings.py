"""Findings: the results of a replay of evidence."""

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
    library_missing: bool = False
    """Whether this machine lacks a library for the check; such a finding does not concern the evidence."""

    def __str__(self) -> str:
        return f"{self.name}: {self.status}, {self.detail}"


def require_same(what: str, findings: Sequence[Finding]) -> None:
    """Check that all findings of a replay are "same".

    Raises:
        GateRefusal: some part differs.
        MissingRequirement: no part differs, but some part is missing.
    """
    named = {status: [finding.name for finding in findings if finding.status == status] for status in ("differs", "missing")}
    if named["differs"]:
        raise GateRefusal(f"{what} differs from the judged engine: {', '.join(named['differs'])}")
    if named["missing"]:
        raise MissingRequirement(f"{what} could not be verified, missing: {', '.join(named['missing'])}")
