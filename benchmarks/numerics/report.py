"""Records of the report, and its rendering as Markdown."""

from typing import Literal

from pipeline.core.strict import StrictModel

Verdict = Literal["HOLDS", "DOES NOT HOLD", "UNDECIDED"]

UNEXPLAINED = "No reason is known."
TIED = "The interval includes no difference: with these texts the two cannot be told apart."


class Claim(StrictModel):
    """A statement of the literature, the measurement, and the verdict."""

    id: str
    statement: str
    published: str
    ours: str
    verdict: Verdict
    why: str
    """Explanation of the verdict; empty when it is HOLDS."""


class Section(StrictModel):
    """A table of measurements and the claims about them."""

    title: str
    intro: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: str = ""
    claims: tuple[Claim, ...] = ()
    measured: str = ""
    """Command and day, where it was measured after the rest."""


class Header(StrictModel):
    """The run that the numbers come from."""

    title: str
    """Name of the model."""
    command: str
    date: str
    machine: str
    versions: dict[str, str]
    checkpoint: str
    texts: str
    seconds: int
    """Processor time of the run."""


class Report(StrictModel):
    """All measurements of one subject."""

    header: Header
    sections: tuple[Section, ...]

    @property
    def claims(self) -> dict[str, Claim]:
        """Claims of all sections, by identifier."""
        return {claim.id: claim for section in self.sections for claim in section.claims}


class Reports(StrictModel):
    """What docs/numerics.json holds: a report a subject, None before its first run."""

    tiny: Report | None = None
    smollm2: Report | None = None


def changed_verdicts(name: str, before: Report | None, after: Report) -> list[str]:
    """Return a line for every claim whose verdict differs, or that only one of a subject's reports has."""
    lines = []
    old_claims, new_claims = ({} if report is None else report.claims for report in (before, after))
    for claim in sorted(old_claims.keys() | new_claims.keys()):
        old, new = (claims[claim].verdict if claim in claims else "absent" for claims in (old_claims, new_claims))
        if old != new:
            lines.append(f"{name}, {claim}: {old} -> {new}")
    return lines
