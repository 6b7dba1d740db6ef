"""Promotion replays what stage=verify replays, and refuses an alteration that summary.json and the registry go along with."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from gate_reports import GATES, gates
from judged_candidates import MemoryRegistry, digests_on_disk
from judged_engine import candidate_of, judged_engine

from pipeline.core.errors import GateRefusal
from pipeline.evidence.reading import read_evidence
from pipeline.evidence.verify import replay, replay_candidate
from pipeline.registry.promotion import Move, promote
from pipeline.registry.summary import Candidate
from pipeline.trust.movelog import MoveLog
from pipeline.verdict.gates import Gates, decide
from pipeline.verdict.report import REPORT_FILE, SAMPLES_FILE, EvaluationReport, SampleRow
from pipeline.verdict.thresholds import Verdict


@pytest.fixture
def candidate(tmp_path: Path) -> Candidate:
    """The candidate of a judged engine, in a store of its own."""
    return candidate_of(judged_engine(tmp_path / "store"))


def cited_anew(candidate: Candidate) -> Candidate:
    """The candidate with the digests of what lies on disk now, as a forger writes them into summary.json."""
    found = digests_on_disk(candidate)
    cited = {name: getattr(candidate, name).model_copy(update={"digest": digest}) for name, digest in found.items()}
    return candidate.model_copy(update=cited)


def promote_it(candidate: Candidate, folder: Path, thresholds: Gates = GATES) -> Move:
    """Promote with a registry that cites whatever the candidate cites."""
    registry = MemoryRegistry(folder)
    registry.versions[candidate.version] = dict(candidate.citations)

    def decide_again(report: EvaluationReport, rows: Sequence[SampleRow]) -> Verdict:
        return decide(report, rows, thresholds)

    return promote([candidate], MoveLog(registry), replay_candidate, decide_again, sweep="s")


def first_finding(candidate: Candidate) -> str:
    """The first line of stage=verify that is not the same."""
    findings = replay(read_evidence(candidate.identity.path.parent))
    return next(str(finding) for finding in findings if finding.status != "same")


def flip_an_answer(report: Path) -> None:
    samples = report.with_name(SAMPLES_FILE)
    samples.write_text(samples.read_text().replace('"candidate_correct":true', '"candidate_correct":false', 1))


def test_evidence_that_nobody_altered_is_promoted(candidate: Candidate, tmp_path: Path) -> None:
    assert promote_it(candidate, tmp_path).champion == "int8"


@pytest.mark.parametrize(
    ("altered", "name"),
    [("engine", "engine: weights.bin"), ("baseline", "baseline: weights.bin"), ("report", "report: samples.jsonl")],
)
def test_what_summary_and_registry_cite_anew_but_the_identity_does_not_is_refused_as_stage_verify_says(
    candidate: Candidate, tmp_path: Path, altered: str, name: str
) -> None:
    if altered == "report":
        for directory in (candidate.report.path.parent, candidate.identity.path.parent):
            flip_an_answer(directory / REPORT_FILE)
    else:
        (getattr(candidate, altered).path / "weights.bin").write_text("altered")
    forged = cited_anew(candidate)
    assert forged != candidate
    with pytest.raises(GateRefusal) as caught:
        promote_it(forged, tmp_path)
    assert str(caught.value) == f"int8 is not promoted: {first_finding(candidate)}"
    assert str(caught.value).startswith(f"int8 is not promoted: {name}: differs, recorded ")


def test_promotion_decides_with_the_gates_of_its_own_command_line(candidate: Candidate, tmp_path: Path) -> None:
    with pytest.raises(GateRefusal, match=r"int8 is not promoted: decided again from its samples it is FAIL"):
        promote_it(candidate, tmp_path, gates(max_mean_kl=1e-6))
