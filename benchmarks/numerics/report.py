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


class Header(StrictModel):
    """The run that the numbers come from."""

    command: str
    date: str
    machine: str
    versions: dict[str, str]
    checkpoint: str
    texts: str
    seconds: int
    """Processor time of the run."""


class Report(StrictModel):
    """The whole report."""

    header: Header
    sections: tuple[Section, ...]

    @property
    def claims(self) -> dict[str, Claim]:
        """Claims of all sections, by identifier."""
        return {claim.id: claim for section in self.sections for claim in section.claims}


def changed_verdicts(before: Report, after: Report) -> list[str]:
    """Return a line for every claim whose verdict differs, or that only one of the reports has."""
    lines = []
    for name in sorted(before.claims.keys() | after.claims.keys()):
        old, new = (report.claims[name].verdict if name in report.claims else "absent" for report in (before, after))
        if old != new:
            lines.append(f"{name}: {old} -> {new}")
    return lines


INTRODUCTION = """\
# What the literature says of quantized KV caches, measured here

Each claim is checked on the tiny model that ships with kvgate, in the oracle's one-pass forced decode: every scored
token reads the quantized cache. The model is far from the published ones (1.1 M parameters, four layers, at most 1,024
tokens), so it is the *kind* of result that is reproduced, never the number; where the kind differs it says so.

- **mean KL**: nats per scored token, against the same model with an FP16 cache. **PPL ratio**: perplexity of prose over
  that of the FP16 cache. **answers**: share of questions that greedy decoding answers exactly (forced argmax).
- Brackets are 95 % intervals of a bootstrap by document. A claim "A is better than B" is judged by how many times the mean KL
  of A that of B is: it HOLDS when the whole interval is above 1, DOES NOT HOLD when it is below, and is UNDECIDED in
  between. Beside it stands the typical text (geometric mean of the paired ratios), since a few tokens make up most of
  a mean KL.
- **shipped** is the checkpoint as it is, with planted outlier channels in the keys of the two retrieving layers
  (stages/tiny/checkpoint/README.md); **natural** is the same function with them taken out, exactly. What depends on
  the outliers is by design, and the second column shows it.
"""


def markdown(report: Report) -> str:
    """Render the report as docs/numerics.md has it."""
    claims = report.claims.values()
    header = report.header
    lines = [INTRODUCTION]
    lines += [
        f"`{header.command}`, {header.date}, {header.seconds} s of {header.machine}; "
        + ", ".join(f"{name} {version}" for name, version in header.versions.items())
        + f"; checkpoint sha256 {header.checkpoint[:16]}; {header.texts}.",
        "",
        "## In short",
        *_table(
            ("claim", "published", "here", "verdict"),
            [(claim.statement, claim.published, claim.ours, f"**{claim.verdict}**") for claim in claims],
        ),
        "",
    ]
    for section in report.sections:
        lines += [f"## {section.title}", section.intro, "", *_table(section.columns, section.rows), ""]
        lines += [section.notes, ""] if section.notes else []
        lines += [f"- **{c.verdict}**: {c.statement}: {c.ours}.{' ' + c.why if c.why else ''}" for c in section.claims]
        lines += [""] if section.claims else []
    return "\n".join(lines)


def _table(columns: tuple[str, ...], rows: tuple[tuple[str, ...], ...] | list[tuple[str, ...]]) -> list[str]:
    marks = ("---",) + ("---:",) * (len(columns) - 1)
    return ["| " + " | ".join(cells) + " |" for cells in (columns, marks, *rows)]
