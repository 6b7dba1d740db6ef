"""What a page is made from."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pipeline.core.records import Sample
from pipeline.registry.summary import Candidate
from pipeline.verdict.report import EvaluationReport, SampleRow


@dataclass(frozen=True)
class Exhibit:
    """A judged candidate with its evidence, as far as that can be read."""

    candidate: Candidate
    problem: str | None = None
    """Why the evidence below is missing; None where it is there."""
    report: EvaluationReport | None = None
    rows: Sequence[SampleRow] = ()
    """The report's samples."""
    samples: Sequence[Sample] = ()
    """What was asked, for the prompts; a sample that is missing here is shown without one."""
    own: Set[str] = frozenset()
    """Ids of those that are the user's own, whose prompts stay where they are."""
    binds: Mapping[str, str] = field(default_factory=dict)
    """What its identity binds: digests, versions and the machine, by name."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The settings of its engine, what it was asked and its gates, nested by name."""
    evidence: Path | None = None
    """Directory that `stage=verify bundle=` replays."""

    @property
    def without_own(self) -> "Exhibit":
        """The same without the prompts of the user's own samples."""
        return replace(self, samples=[sample for sample in self.samples if sample.id not in self.own], own=frozenset())


@dataclass(frozen=True)
class Occasion:
    """The command that writes a page."""

    model: str
    """The checkpoint's short name."""
    workdir: Path
    sweep: str
    """Id of the sweep that the candidates belong to."""
    version: str
    """Of kvgate."""
    command: str | None = None
    """That judged the candidates, whole; None where kvgate was called from Python."""
    unfinished: str | None = None
    """How much of the sweep is missing; None where it ended."""
    champion: str | None = None
    """Name of the candidate that serves now; None where the command promoted none."""
    message: str = ""
    """What a promotion says of the champion."""
    passed_over: Mapping[str, str] = field(default_factory=dict)
    """Candidate's name -> why it does not serve."""
