import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from judged_candidates import MemoryRegistry, decide_pass, judged_candidate, replay_without_findings

from pipeline.core.errors import GateRefusal, MissingRequirement, UserError
from pipeline.registry import promotion
from pipeline.registry.promotion import Move, choose
from pipeline.registry.proof import Finding, Replay, ReplayedEvidence
from pipeline.registry.summary import Candidate, Cited, Registration, evidence_digest
from pipeline.trust.movelog import MoveLog
from pipeline.verdict.coverage import Coverage, Exercised, Limits
from pipeline.verdict.gates import Decide
from pipeline.verdict.report import EvaluationReport, SampleRow, load_report, load_rows
from pipeline.verdict.thresholds import Status, Verdict


def promote(
    candidates: Sequence[Candidate],
    registry: MemoryRegistry,
    replay: Replay = replay_without_findings,
    decide: Decide = decide_pass,
    *,
    sweep: str = "s",
    name: str | None = None,
) -> Move:
    return promotion.promote(candidates, MoveLog(registry), replay, decide, sweep=sweep, name=name)


def rollback(registry: MemoryRegistry) -> Move:
    return promotion.rollback(MoveLog(registry))


@pytest.fixture
def registry(tmp_path: Path) -> MemoryRegistry:
    return MemoryRegistry(tmp_path)


def make(
    folder: Path, registry: MemoryRegistry, policy: str, *, kib: float = 2.0, kl: float = 0.1, verdict: Status = "PASS"
) -> Candidate:
    """A registered candidate with a baseline, an engine and a report on disk."""
    metrics = {"quality/kl_mean": kl, "memory/max_live_tokens": 1e6 / kib}
    candidate = judged_candidate(folder, policy, verdict, metrics=metrics)
    version = str(len(registry.versions) + 1)
    registry.versions[version] = {**candidate.citations, "kv": policy}
    return changed(candidate, registration=Registration(run_id="run", model_version=version))


def changed(candidate: Candidate, **changes: Any) -> Candidate:
    return candidate.model_copy(update=changes)


def cite_report(candidate: Candidate, registry: MemoryRegistry) -> Candidate:
    """Cite the report as it lies on disk now, in the candidate and in the registry."""
    digest = evidence_digest(candidate.report.path)
    registry.versions["1"]["report_digest"] = digest
    return changed(candidate, report=Cited(path=candidate.report.path, digest=digest))


def test_the_smallest_cache_that_passed_becomes_champion(tmp_path: Path, registry: MemoryRegistry) -> None:
    candidates = [
        make(tmp_path, registry, "int8", kib=2.06),
        make(tmp_path, registry, "fp8k_int4v", kib=1.56),
        make(tmp_path, registry, "int4", kib=1.06, verdict="FAIL"),
        make(tmp_path, registry, "int4_g32", kib=1.1, verdict="INCONCLUSIVE"),
    ]
    move = promote(candidates, registry, sweep="s1")
    assert (move.champion, move.version, move.changed) == ("fp8k_int4v", "2", True)
    assert registry.aliases == {"champion": "2"}
    assert registry.versions["2"]["promoted_by_sweep"] == "s1"
    assert candidates[1].engine.digest in registry.versions["2"]["evidence"]


def test_a_tie_goes_to_the_lower_mean_kl_and_a_missing_one_loses(tmp_path: Path, registry: MemoryRegistry) -> None:
    better, worse = make(tmp_path, registry, "a", kl=0.01), make(tmp_path, registry, "z", kl=0.02)
    unknown = changed(worse, name="zz", metrics={**worse.metrics, "quality/kl_mean": None})
    assert choose([worse, unknown, better]).name == "a"


def test_live_tokens_decide_and_not_the_bytes_of_a_token(tmp_path: Path, registry: MemoryRegistry) -> None:
    # exact sink and recent tokens cost memory per sequence, which KiB per token does not show
    small = changed(make(tmp_path, registry, "small", kib=1.0), metrics={"memory/max_live_tokens": 10.0})
    roomy = changed(make(tmp_path, registry, "roomy", kib=1.1), metrics={"memory/max_live_tokens": 12.0})
    unknown = changed(make(tmp_path, registry, "unknown", kib=0.5), metrics={})
    assert choose([small, roomy, unknown]).name == "roomy"


def test_nothing_is_promoted_when_none_passed_and_each_reason_is_told(tmp_path: Path, registry: MemoryRegistry) -> None:
    with pytest.raises(GateRefusal, match=r"int4: FAIL \(mean KL\)"):
        promote([make(tmp_path, registry, "int4", verdict="FAIL")], registry)
    with pytest.raises(GateRefusal, match="there is no candidate"):
        promote([], registry)


def test_promote_refuses_when_the_engine_on_disk_changed(tmp_path: Path, registry: MemoryRegistry) -> None:
    candidate = make(tmp_path, registry, "fp8")
    (candidate.engine.path / "bundle.json").write_text("another")
    with pytest.raises(GateRefusal, match=r"its engine .* is not the one"):
        promote([candidate], registry)
    assert registry.moves == []


def test_promote_refuses_when_baseline_digest_differs(tmp_path: Path, registry: MemoryRegistry) -> None:
    candidate = make(tmp_path, registry, "fp8")
    (candidate.baseline.path / "extra").write_text("x")
    with pytest.raises(GateRefusal, match=r"its baseline .* is not the one"):
        promote([candidate], registry)


@pytest.mark.parametrize("field", ["engine_digest", "baseline_digest"])
def test_promote_refuses_a_report_about_something_else(tmp_path: Path, registry: MemoryRegistry, field: str) -> None:
    candidate = make(tmp_path, registry, "fp8")
    report = candidate.report.path
    report.write_text(json.dumps({**json.loads(report.read_text()), field: "other"}))
    with pytest.raises(GateRefusal, match=r"about another engine|with another baseline"):
        promote([cite_report(candidate, registry)], registry)


def test_promote_refuses_an_identity_that_was_edited_is_gone_or_is_not_registered(
    tmp_path: Path, registry: MemoryRegistry
) -> None:
    candidate = make(tmp_path, registry, "fp8")
    registry.versions["1"]["identity_digest"] = "other"
    with pytest.raises(GateRefusal, match="version 1 cites another identity_digest"):
        promote([candidate], registry)
    candidate.identity.path.write_text("edited")
    with pytest.raises(GateRefusal, match=r"identity\.json is not the one that it cites"):
        promote([candidate], registry)
    candidate.identity.path.unlink()
    with pytest.raises(GateRefusal, match=r"its identity .* is gone"):
        promote([candidate], registry)


def test_promote_refuses_evidence_that_was_edited_or_is_gone(tmp_path: Path, registry: MemoryRegistry) -> None:
    candidate = make(tmp_path, registry, "fp8")
    candidate.samples.write_text('{"id": "b"}\n')
    with pytest.raises(GateRefusal, match=r"its report .* is not the one"):
        promote([candidate], registry)
    gone = changed(candidate, report=Cited(path=tmp_path / "nowhere", digest=candidate.report.digest))
    with pytest.raises(GateRefusal, match=r"its report .*nowhere is gone"):
        promote([gone], registry)


def test_promote_reads_samples_whose_texts_hold_unicode_line_separators(tmp_path: Path, registry: MemoryRegistry) -> None:
    candidate = make(tmp_path, registry, "fp8")
    (sample,) = load_rows(candidate.samples.parent)
    sample = sample.model_copy(update={"id": "a\u2028b\u2029c\x85d"})
    candidate.samples.write_text(sample.model_dump_json() + "\n", encoding="utf-8")
    rows: list[SampleRow] = []

    def decide(_report: EvaluationReport, samples: Sequence[SampleRow]) -> Verdict:
        rows.extend(samples)
        return decide_pass(_report, samples)

    promote([cite_report(candidate, registry)], registry, decide=decide)
    assert rows == [sample]


@pytest.mark.parametrize("verdict", ["FAIL", "INCONCLUSIVE"])
def test_promote_decides_again_and_believes_no_claimed_pass(tmp_path: Path, registry: MemoryRegistry, verdict: Status) -> None:
    candidate = make(tmp_path, registry, "fp8")

    def says_no(report: EvaluationReport, rows: Sequence[SampleRow]) -> Verdict:
        assert report.engine_digest == candidate.engine.digest
        assert rows == load_rows(candidate.samples.parent)
        return Verdict(status=verdict, reasons=["mean KL too high"], checks=[], samples_needed={})

    with pytest.raises(GateRefusal, match=f"it is {verdict}: mean KL too high"):
        promote([candidate], registry, decide=says_no)


def replay_that_finds(*findings: Finding) -> Replay:
    def replay(candidate: Candidate) -> ReplayedEvidence:
        directory = candidate.report.path.parent
        return ReplayedEvidence(findings, load_report(directory), load_rows(directory))

    return replay


def test_promote_refuses_on_the_first_finding_that_is_not_the_same(tmp_path: Path, registry: MemoryRegistry) -> None:
    candidate = make(tmp_path, registry, "fp8")
    same = Finding("chain", "same", "9 artifacts")
    differs, missing = Finding("weights", "differs", "recorded a, found b"), Finding("engine: w", "missing", "not in x")
    for findings, expected in (
        ((same, differs, missing), "weights: differs, recorded a, found b"),
        ((same, missing, differs), "engine: w: missing, not in x"),
    ):
        with pytest.raises(GateRefusal) as caught:
            promote([candidate], registry, replay_that_finds(*findings))
        assert str(caught.value) == f"fp8 is not promoted: {expected}"
    assert registry.moves == []


COVERED = Coverage(overall=Exercised.merged([]).model_copy(update={"longest_context": 1003, "batch_sizes": {16: 9}}), cells=[])


def replay_of_an_engine_built_for(limits: Limits) -> Replay:
    def replay(candidate: Candidate) -> ReplayedEvidence:
        directory = candidate.report.path.parent
        report = load_report(directory).model_copy(update={"coverage": COVERED})
        return ReplayedEvidence((), report, load_rows(directory), limits)

    return replay


def test_promote_refuses_an_engine_that_allows_more_than_was_judged(tmp_path: Path, registry: MemoryRegistry) -> None:
    candidate = make(tmp_path, registry, "fp8")
    for limits, expected in (
        (Limits(tokens=4096, batch=16), "up to 1,003 tokens, batch 16, and its bundle allows 4,096 tokens: build it for 1024"),
        (Limits(tokens=1024, batch=32), "and its bundle allows batches of 32: build it for 16"),
    ):
        with pytest.raises(GateRefusal, match=expected):
            promote([candidate], registry, replay_of_an_engine_built_for(limits))
    assert registry.moves == []


def test_a_champion_carries_how_far_its_verdict_holds(tmp_path: Path, registry: MemoryRegistry) -> None:
    move = promote([make(tmp_path, registry, "fp8")], registry, replay_of_an_engine_built_for(Limits(tokens=1024, batch=16)))
    tags = registry.tags(move.version)
    assert tags is not None
    assert (tags["max_tokens"], tags["max_batch"]) == ("1003", "16")
    assert move.message.endswith("is the champion, up to 1,003 tokens, batch 16")


def test_a_library_that_the_replay_lacks_is_a_missing_requirement_unless_something_differs(
    tmp_path: Path, registry: MemoryRegistry
) -> None:
    candidate = make(tmp_path, registry, "fp8")
    library = Finding("samples, made again", "missing", "transformers is not installed", library_missing=True)
    with pytest.raises(MissingRequirement, match=r"fp8 is not promoted: .*transformers is not installed"):
        promote([candidate], registry, replay_that_finds(library))
    with pytest.raises(GateRefusal, match="verdict, decided again"):
        promote([candidate], registry, replay_that_finds(library, Finding("verdict, decided again", "differs", "it is FAIL")))
    assert registry.moves == []


def test_promote_refuses_an_identity_that_cannot_be_read(tmp_path: Path, registry: MemoryRegistry) -> None:
    def replay(_candidate: Candidate) -> ReplayedEvidence:
        raise UserError("identity.json: schema_version: Field required")

    with pytest.raises(GateRefusal, match=r"fp8 is not promoted: identity\.json: schema_version"):
        promote([make(tmp_path, registry, "fp8")], registry, replay)


def test_promote_refuses_what_the_registry_does_not_know_or_knows_otherwise(tmp_path: Path, registry: MemoryRegistry) -> None:
    candidate = make(tmp_path, registry, "fp8")
    with pytest.raises(GateRefusal, match="not registered"):
        promote([changed(candidate, registration=None)], registry)
    with pytest.raises(GateRefusal, match="version 9 is not in the registry"):
        promote([changed(candidate, registration=Registration(run_id="run", model_version="9"))], registry)
    registry.versions["1"]["report_digest"] = "other"
    with pytest.raises(GateRefusal, match="version 1 cites another report_digest"):
        promote([candidate], registry)


def test_previous_is_set_before_champion_moves(tmp_path: Path, registry: MemoryRegistry) -> None:
    one, two = make(tmp_path, registry, "int8"), make(tmp_path, registry, "fp8")
    promote([one], registry, sweep="s1")
    registry.moves.clear()
    move = promote([two], registry, sweep="s2")
    assert registry.moves == [("previous", "1"), ("champion", "2")]
    assert move.previous == "1"


def test_promoting_the_champion_again_moves_nothing(tmp_path: Path, registry: MemoryRegistry) -> None:
    one, two = make(tmp_path, registry, "int8"), make(tmp_path, registry, "fp8")
    promote([one], registry, sweep="s1")
    promote([two], registry, sweep="s2")
    registry.moves.clear()
    move = promote([two], registry, sweep="s3")
    assert not move.changed
    assert "champion already" in move.message
    assert registry.moves == []
    assert registry.aliases == {"champion": "2", "previous": "1"}


def test_promotion_after_an_interrupted_one_repairs_the_aliases(tmp_path: Path, registry: MemoryRegistry) -> None:
    one, two = make(tmp_path, registry, "int8"), make(tmp_path, registry, "fp8")
    promote([one], registry, sweep="s1")
    registry.aliases["previous"] = "1"  # killed between the two moves
    with pytest.raises(UserError, match="no previous champion"):
        rollback(registry)
    promote([two], registry, sweep="s2")
    assert registry.aliases == {"champion": "2", "previous": "1"}


def test_rollback_brings_the_previous_champion_back_once(tmp_path: Path, registry: MemoryRegistry) -> None:
    for kv in ("int8", "fp8"):
        promote([make(tmp_path, registry, kv)], registry, sweep=kv)
    move = rollback(registry)
    assert (move.champion, move.version) == ("int8", "1")
    assert registry.aliases == {"champion": "1"}
    assert "rolled_back_at" in registry.versions["2"]
    with pytest.raises(UserError, match="no previous champion"):
        rollback(registry)


def test_rollback_without_a_champion_is_an_error(registry: MemoryRegistry) -> None:
    with pytest.raises(UserError, match="no previous champion"):
        rollback(registry)


def test_what_was_rolled_back_stays_back_until_it_is_judged_anew_or_asked_for_by_name(
    tmp_path: Path, registry: MemoryRegistry
) -> None:
    one, two = make(tmp_path, registry, "int8", kib=2.0), make(tmp_path, registry, "fp8", kib=1.0)
    promote([one], registry, sweep="s1")
    promote([one, two], registry, sweep="s2")
    rollback(registry)
    assert promote([one, two], registry, sweep="s3").message == "int8 (version 1) is the champion already"
    with pytest.raises(GateRefusal, match=r"fp8: PASS, but it was rolled back at .*: judge it anew, .*promote\.name='fp8'"):
        promote([two], registry, sweep="s3")
    assert registry.aliases == {"champion": "1"}
    move = promote([one, two], registry, sweep="s3", name="fp8")
    assert "it had been rolled back at" in move.message
    assert registry.aliases == {"champion": "2", "previous": "1"}
    rollback(registry)
    judged_anew = make(tmp_path / "anew", registry, "fp8", kib=1.0)
    report = load_report(judged_anew.report.path.parent).model_copy(update={"workloads_digest": "others"})
    judged_anew.report.path.write_text(report.model_dump_json())
    digest = evidence_digest(judged_anew.report.path)
    judged_anew = changed(judged_anew, report=Cited(path=judged_anew.report.path, digest=digest))
    registry.versions["3"] |= judged_anew.citations
    assert promote([one, judged_anew], registry, sweep="s4").version == "3"


def test_a_candidate_that_is_asked_for_by_name_must_exist_and_have_passed(tmp_path: Path, registry: MemoryRegistry) -> None:
    fp8, int4 = make(tmp_path, registry, "fp8"), make(tmp_path, registry, "int4", verdict="FAIL")
    with pytest.raises(UserError, match=r"promote\.name=fp9: no candidate of the sweep is called so"):
        promote([fp8, int4], registry, name="fp9")
    with pytest.raises(GateRefusal, match=r"int4: FAIL \(mean KL\)"):
        promote([fp8, int4], registry, name="int4")


def test_of_a_summary_only_versions_are_taken_and_their_artifacts_are_decided_again(
    tmp_path: Path, registry: MemoryRegistry
) -> None:
    true = make(tmp_path, registry, "fp8", kib=2.0)
    edited = changed(
        true,
        name="int8",
        verdict="FAIL",
        metrics={"memory/max_live_tokens": 1e9},
        covered="up to 1,000,000 tokens",
        engine=Cited(path=tmp_path, digest="forged"),
    )
    registered = [(Registration(run_id="run", model_version="1"), registry.versions["1"])]

    def find(registration: Registration, _tags: Mapping[str, str]) -> tuple[Candidate, ReplayedEvidence]:
        return changed(true, registration=registration, verdict="INCONCLUSIVE"), replay_without_findings(true)

    (found,) = promotion.judged_again([edited, edited], registered, find, decide_pass, "tiny")
    assert found == true
    with pytest.raises(GateRefusal, match="version 1 is of model tiny, not llama"):
        promotion.judged_again([edited], registered, find, decide_pass, "llama")
    for lost, expected in ((None, "not registered"), (Registration(run_id="r", model_version="9"), "version 9 is not in")):
        with pytest.raises(GateRefusal, match=expected):
            promotion.judged_again([changed(true, registration=lost)], registered, find, decide_pass, "tiny")
