"""The input of a page, and the form of its texts: untrusted names, prompts and answers, and rounded numbers.

Jinja escapes HTML; `shown` masks secrets and replaces characters that a browser would interpret or hide.
"""

import math
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from stages.core.records import Sample
from stages.core.redaction import redact_text
from stages.verdict.candidate import Candidate
from stages.verdict.report import EvaluationReport, SampleRow

BASELINE = "baseline"
"""Verdict of an FP16 engine in the overview."""


@dataclass(frozen=True)
class Exhibit:
    """A judged candidate and its readable evidence."""

    candidate: Candidate
    problem: str | None = None
    """Why the fields below are missing; None if they are present."""
    report: EvaluationReport | None = None
    rows: Sequence[SampleRow] = ()
    samples: Sequence[Sample] = ()
    """Samples with their prompts. Answers to samples that are missing here are shown without a prompt."""
    private: bool = False
    """Whether samples are the user's own, whose prompts are not uploaded to the tracking store."""
    evidence: Path | None = None
    """Directory for `stage=verify bundle=`."""

    @property
    def size(self) -> str:
        """The number of questions and documents; "" without samples."""
        documents = len({row.document for row in self.rows})
        return f"{len(self.rows):,} questions about {documents:,} documents" if self.rows else ""


@dataclass(frozen=True)
class Occasion:
    """The command that writes a page, and its result."""

    model: str
    """The checkpoint's short name."""
    workdir: Path
    sweep: str
    """Id of the sweep that the candidates belong to."""
    version: str
    overview: Sequence[Sequence[str]]
    """Headings, then for every engine its name, its verdict or BASELINE, and its figures."""
    command: str | None = None
    """The full command line that judged the candidates; None if kvgate was called from Python."""
    unfinished: str | None = None
    """The missing part of the sweep; None if the sweep is complete."""
    champion: str | None = None
    """Name of the candidate that serves now; None if the command promoted no candidate."""
    message: str = ""
    """The promotion's message about the champion."""
    passed_over: Mapping[str, str] = field(default_factory=dict)
    """Candidate name -> why the candidate does not serve."""


KEPT = "\n\t"
ACTED_ON = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}
"""Unicode categories of control characters, marks that reorder or hide text, surrogates, and line separators."""


@lru_cache(maxsize=8192)
def shown(text: str) -> str:
    """Return `text` with masked secrets; invisible characters are replaced by escapes such as `\\u{202e}`."""
    return "".join(
        f"\\u{{{ord(c):04x}}}" if unicodedata.category(c) in ACTED_ON and c not in KEPT else c for c in redact_text(text)
    )


def quantity(value: float | None) -> str:
    """Format a number with three significant digits; a missing or non-finite number becomes a dash."""
    if value is None or not math.isfinite(value):
        return "–"
    form = ".2e" if value and not 1e-3 <= abs(value) < 1e4 else ",.0f" if abs(value) >= 999.5 else ".3g"
    return format(value or 0.0, form).replace("e-0", "e-").replace("e+0", "e").replace("e+", "e").replace("-", "−")
