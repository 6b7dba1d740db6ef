"""Promotion and rollback: the chosen candidate, refusals, and the resulting aliases."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers.refusals import refused
from helpers.registry.candidates import MemoryRegistry, engines_of, evidence_digest
from helpers.verdicts.reports import measured_once

from pipeline.evidence.reading import Finding
from pipeline.registry.promotion import PromotionMove, choose_champion
from pipeline.registry.tracking import LostFiles, Version
from stages.core.errors import GateRefusal, MissingRequirement, UserError
from stages.verdict.candidate import Candidate, Cited
from stages.verdict.coverage import Exercised, Limits
from stages.verdict.report import REPORT_FILE, EvaluationReport, SampleRow, load_report, load_rows
from stages.verdict.verdict import Check, Gate, Status, Verdict


@pytest.fixture
def registry(tmp_path: Path) -> MemoryRegistry:
    return MemoryRegistry(tmp_path)


@pytest.fixture
def fp8(registry: MemoryRegistry) -> Candidate:
    return registry.judge("fp8")


def changed(candidate: Candidate, **changes: Any) -> Candidate:
    return candidate.model_copy(update=changes)


def promote(registry: MemoryRegistry, *candidates: Candidate, name: str | None = None, **options: Any) -> PromotionMove:
    """Promote candidates. `options` are arguments of `MemoryRegistry.engines`."""
    return registry.engines(**options).promote(candidates, "tiny", name)


def test_an_engine_is_read_and_replayed_once_a_command(fp8: Candidate, registry: MemoryRegistry) -> None:
    engines = registry.engines()
    assert engines.promote([fp8], "tiny").message == "fp8 (version 1) is the champion"
    fp8.report.path.unlink()
    engines.find(engines.model.versions["1"]).verify()
    assert registry.replays == ["fp8"]
    moves = list(registry.moves)
    engines.promote([fp8], "tiny")
    assert registry.moves == moves, "another command may have made the same move meanwhile"
    registry.aliases["champion"] = registry.judge("int8").version
    with pytest.raises(GateRefusal, match="champion: another command moved it; nothing was changed; run it again"):
        engines.promote([fp8], "tiny")
    assert registry.moves == moves


def test_the_smallest_passing_cache_becomes_champion(registry: MemoryRegistry) -> None:
    large, small = registry.judge("int8", 480), registry.judge("fp8k_int4v", 640)
    others = registry.judge("int4", 900, "FAIL"), registry.judge("int4_g32", 890, "INCONCLUSIVE")
    move = promote(registry, large, small, *others)
    assert (move.champion, "(version 2) is the champion" in move.message) == ("fp8k_int4v", True)
    assert registry.aliases == {"champion": "2"}
    assert registry.versions["2"]["promoted_over"] == "none"
    stays = promote(registry, large)
    assert (stays.champion, "(version 2) stays the champion" in stays.message) == ("fp8k_int4v", True)
    assert stays.candidates == (large, small)
    assert promote(registry, large, name="int8").champion == "int8"
    assert promote(registry, small, large).champion == "fp8k_int4v"
    assert promote(registry, registry.judge("int4", 2000)).champion == "int4"


def fail_the_champion(report: EvaluationReport, _rows: Sequence[SampleRow]) -> Verdict:
    status: Status = "FAIL" if report.policy == "fp8k_int4v" else "PASS"
    return Verdict(status=status, reasons=[], checks=[])


@pytest.mark.parametrize(
    ("champion", "candidate", "given", "competes"),
    [
        ({"checkpoint": "of one"}, {"checkpoint": "of one"}, {}, True),
        ({"checkpoint": "of one"}, {"checkpoint": "of another"}, {}, False),
        ({"metrics": {}}, {}, {}, False),  # the larger cache wins
        ({}, {}, {"decide": fail_the_champion}, False),
    ],
)
def test_a_champion_competes_only_if_it_passes_on_the_checkpoint(
    registry: MemoryRegistry, champion: dict[str, Any], candidate: dict[str, Any], given: dict[str, Any], competes: bool
) -> None:
    small, _ = registry.judge("fp8k_int4v", 1000), registry.judge("int8", 500)
    promote(registry, small)
    report = load_report(small.report.path.parent).model_copy(update={"policy": "fp8k_int4v"})
    small.report.path.write_text(report.model_dump_json())
    registry.change("1", baseline=Cited(path=registry.folder, digest="of a rebuilt baseline"), **champion)
    move = promote(registry, registry.change("2", **candidate), **given)
    assert (move.champion == "fp8k_int4v") is competes


def test_a_champion_without_valid_evidence_does_not_stay(registry: MemoryRegistry) -> None:
    promote(registry, registry.judge("fp8k_int4v", 1000))
    move = promote(registry, registry.judge("int8", 500), replay=lambda item: [DIFFERS] if item.name == "fp8k_int4v" else [])
    assert move.champion == "int8"
    assert "PASS, but it cannot stay the champion: weights: differs" in move.passed_over["fp8k_int4v"]


def test_a_better_champion_that_cannot_be_verified_here_blocks_a_promotion(registry: MemoryRegistry) -> None:
    promote(registry, registry.judge("fp8k_int4v", 1000))
    int8 = registry.judge("int8", 500)
    with pytest.raises(
        MissingRequirement, match=r"the champion, version 1 \(fp8k_int4v\), cannot compete: .*promote\.name=NAME"
    ):
        promote(registry, int8, replay=lambda candidate: [MISSING] if candidate.name == "fp8k_int4v" else [])
    assert registry.aliases == {"champion": "1"}


def test_a_champion_whose_files_are_gone_does_not_compete(registry: MemoryRegistry) -> None:
    promote(registry, registry.judge("fp8k_int4v", 1000))

    def fetch(version: Version) -> None:
        raise LostFiles(f"no files of {version}")

    engines = engines_of(registry, [registry.judge("int8", 500)])
    engines.fetch = fetch
    assert engines.promote([registry.candidates["2"]], "tiny").champion == "int8"


def test_a_candidate_that_is_lost_does_not_hinder_another(fp8: Candidate, registry: MemoryRegistry) -> None:
    lost = changed(registry.judge("int8"), version="9")
    with pytest.raises(GateRefusal, match="int8 is not promoted: version 9 is not in the registry"):
        promote(registry, lost, fp8)
    assert promote(registry, lost, fp8, name="fp8").champion == "fp8"


def test_live_tokens_decide_and_then_the_lower_mean_kl(fp8: Candidate) -> None:
    # Exact sink and recent tokens need memory per sequence, which KiB per token does not show.
    def judged(name: str, tokens: float | None, kl: float | None, **changes: Any) -> Candidate:
        known = {"memory/max_live_tokens": tokens, "quality/kl_mean": kl}
        return changed(fp8, name=name, metrics={key: value for key, value in known.items() if value is not None}, **changes)

    assert choose_champion([judged("a", 10.0, 0.1), judged("b", 12.0, 0.2), judged("c", None, 0.0)]).name == "b"
    assert choose_champion([judged("z", 9.0, 0.02), judged("zz", 9.0, None), judged("a", 9.0, 0.01)]).name == "a"
    assert choose_champion([judged("reference", 9.0, 0.0, backend="torch"), judged("a", 9.0, 0.1)]).name == "a"


def test_promote_decides_again_and_believes_no_claimed_pass(fp8: Candidate, registry: MemoryRegistry) -> None:
    sample = load_rows(fp8.samples.parent)[0].model_copy(update={"id": "a\u2028b\u2029c\x85d"})
    fp8.samples.write_text(sample.model_dump_json() + "\n", encoding="utf-8")

    def says_no(report: EvaluationReport, rows: Sequence[SampleRow]) -> Verdict:
        assert report.engine_digest == fp8.engine.digest
        assert rows == [sample], "unicode line separators end no row"
        return Verdict(status="INCONCLUSIVE", reasons=["mean KL too high"], checks=[])

    for name in (None, "fp8"):
        with pytest.raises(GateRefusal, match=r"no candidate passed: fp8: INCONCLUSIVE \(mean KL too high\)"):
            promote(registry, fp8, name=name, decide=says_no)
    with pytest.raises(GateRefusal, match="there is no candidate"):
        promote(registry)


SAME = Finding("chain", "same", "9 artifacts")
DIFFERS, MISSING = Finding("weights", "differs", "recorded a, found b"), Finding("engine: w", "missing", "not in x")


@pytest.mark.parametrize(
    ("findings", "kind", "expected"),
    [
        ((SAME, DIFFERS, MISSING), GateRefusal, "weights: differs, recorded a, found b"),
        ((SAME, MISSING, DIFFERS), GateRefusal, "weights: differs, recorded a, found b"),
        ((SAME, MISSING), MissingRequirement, "engine: w: missing, not in x"),
    ],
)
def test_promote_refuses_on_the_first_different_finding(
    fp8: Candidate, registry: MemoryRegistry, findings: tuple[Finding, ...], kind: type[Exception], expected: str
) -> None:
    with refused(kind, f"fp8 is not promoted: {expected}"):
        promote(registry, fp8, replay=lambda _: findings)
    assert registry.moves == []


def test_an_engine_beyond_its_verdicts_limits_is_not_promoted(fp8: Candidate, registry: MemoryRegistry) -> None:
    limits = Exercised(longest_context=1003, batch=16)
    changes = {"coverage": limits, "tests": measured_once(stress=None)}
    report = load_report(fp8.report.path.parent).model_copy(update=changes)
    fp8.report.path.write_text(report.model_dump_json())
    for built_for, expected in (
        (Limits(tokens=4096, batch=16), "up to 1,003 tokens, batch 16, and its bundle allows 4,096 tokens: build it for 1024"),
        (Limits(tokens=1024, batch=32), "allows batches of 32: build it for 16, or judge it with workloads.batch_size=32"),
    ):
        with pytest.raises(GateRefusal, match=expected):
            promote(registry, fp8, built_for=built_for)
    assert registry.moves == []
    move = promote(registry, fp8, built_for=Limits(tokens=1024, batch=16))
    assert move.message.endswith("is the champion, up to 1,003 tokens, batch 16")


def test_a_rollback_without_a_champion_is_refused(registry: MemoryRegistry) -> None:
    """MLflow removes the alias of a deleted version."""
    promote(registry, registry.judge("int8", 500))
    promote(registry, *registry.candidates.values(), registry.judge("fp8", 1000))
    del registry.aliases["champion"]
    with pytest.raises(UserError, match="champion cannot go back: no engine serves"):
        registry.engines().rollback()


def test_a_trial_on_short_questions_does_not_replace_the_champion(registry: MemoryRegistry) -> None:
    def tested(policy: str, live_tokens: float, tokens: int) -> Candidate:
        candidate = registry.judge(policy, live_tokens)
        return registry.change(candidate.version, metrics={**candidate.metrics, "quality/covered_tokens": float(tokens)})

    champion, trial, half = tested("fp8", 1000, 16_384), tested("int4", 2000, 140), tested("int8", 1100, 8192)
    untested = registry.judge("int4_g32", 3000)
    promote(registry, champion)
    with pytest.raises(
        GateRefusal,
        match=r"int4: PASS, but it was tested up to 140 tokens, and the champion, version 1 \(fp8\), up "
        r"to 16,384: judge it on longer questions, as with workloads.lengths=\[16384\], or.*promote\.name='int4'",
    ):
        promote(registry, trial)
    assert registry.aliases == {"champion": "1"}
    move = promote(registry, trial, half, untested)
    assert move.champion == "int8"
    assert "tested up to 140 tokens" in move.passed_over["int4"]
    assert "tested up to 0 tokens" in move.passed_over["int4_g32"]
    assert promote(registry, trial, name="int4").champion == "int4"


def test_the_best_of_several_verdicts_on_one_engine_is_not_promoted(registry: MemoryRegistry) -> None:
    """`-m seed=0,1` judges an engine twice, and a PASS by chance becomes more likely."""
    first, small = registry.judge("fp8", 2000), registry.judge("int8", 1000)
    seeds = [registry.judge("fp8", 2000, "INCONCLUSIVE"), first]
    assert {candidate.engine.digest for candidate in seeds} == {first.engine.digest}
    with pytest.raises(GateRefusal, match=r"fp8: PASS, but it is the engine of fp8, which is INCONCLUSIVE in this sweep"):
        promote(registry, *seeds)
    assert promote(registry, *seeds, small).champion == "int8"
    assert promote(registry, *seeds, name="fp8").champion == "fp8"


def judge_on(registry: MemoryRegistry, questions: str, verdict: Status, **changes: Any) -> Candidate:
    """Register a verdict on one and the same engine. Unless `changes` has checks, the recovery decides it."""
    judged = registry.judge("fp8", 1000, verdict)
    folder = registry.folder / f"judged-{judged.version}"
    shutil.copytree(judged.report.path.parent, folder)
    report = load_report(folder).model_copy(update={"workloads_digest": questions})
    (folder / REPORT_FILE).write_text(report.model_dump_json())
    cited = Cited(path=folder / REPORT_FILE, digest=evidence_digest(folder / REPORT_FILE))
    checks = [Check.of(Gate.RECOVERY, "all", status=verdict, text="a reason")]
    return registry.change(judged.version, **{"report": cited, "checks": checks, **changes})


QUICK = [Check.of(gate, "all", status="INCONCLUSIVE", text="a reason") for gate in (Gate.RECOVERY, Gate.CONFORMANCE)]
WRONG = [Check.of(Gate.STRESS_TEST, "candidate", status="FAIL", text="a reason")]
OTHER_BASELINE = Cited(path=Path("fp16"), digest="of another baseline")


@pytest.mark.parametrize(
    ("earlier", "changes", "needed"),
    [
        ([], {}, 1),
        ([("a", "PASS")], {}, 1),
        ([("a", "INCONCLUSIVE")], {}, 2),
        ([("a", "FAIL")], {}, 2),
        ([("a", "FAIL")], {"checks": WRONG}, 2),  # no question decided it
        ([("a", "INCONCLUSIVE"), ("a", "FAIL"), ("b", "INCONCLUSIVE"), ("c", "PASS")], {}, 3),
        ([("judged", "INCONCLUSIVE")], {}, 1),  # on the same questions
        ([("a", "INCONCLUSIVE")], {"checks": QUICK}, 1),  # could not pass
        ([("a", "INCONCLUSIVE")], {"baseline": OTHER_BASELINE}, 1),
    ],
)
def test_an_engine_that_is_judged_until_it_passes_needs_as_many_attempts(
    registry: MemoryRegistry, earlier: list[tuple[str, Status]], changes: dict[str, Any], needed: int
) -> None:
    for questions, verdict in earlier:
        judge_on(registry, questions, verdict, **changes)
    judged = judge_on(registry, "judged", "PASS")
    for attempt in range(1, needed):
        with pytest.raises(
            GateRefusal,
            match=rf"fp8: PASS, but it did not pass on other questions \(version 1 .* with gates.attempt={needed}, or",
        ):
            promote(registry, judged, attempt=attempt)
    assert promote(registry, judged, attempt=needed).champion == "fp8"
    assert "is the champion already" in promote(registry, judged).message
    registry.aliases.clear()
    assert promote(registry, judged, name="fp8").champion == "fp8"


def test_a_promotion_says_that_it_replaces_another_checkpoint(registry: MemoryRegistry) -> None:
    """The default name comes from the checkpoint's directory, so two services may share a registered model by mistake."""
    messages = []
    for checkpoint in (None, "of one", "of one", "of another"):
        candidate = registry.judge("fp8")
        messages.append(promote(registry, registry.change(candidate.version, checkpoint=checkpoint)).message)
    assert ["another checkpoint" in message for message in messages] == [False, False, False, True]
    assert messages[3] == "fp8 (version 4) is the champion over version 3 of another checkpoint"


def test_an_engine_that_another_user_rolled_back_meanwhile_is_not_promoted(registry: MemoryRegistry) -> None:
    promote(registry, registry.judge("int8", 500))
    fp8 = registry.judge("fp8", 1000)

    def replay(_: Candidate) -> list[Finding]:
        registry.versions[fp8.version]["rolled_back_at"] = "2026-11-30T00:00:00+00:00"
        return []

    with pytest.raises(GateRefusal, match="fp8 is not promoted: another command rolled it back meanwhile"):
        registry.engines(replay=replay).promote(list(registry.candidates.values()), fp8.model)
    assert registry.aliases["champion"] == "1"


def test_a_rolled_back_engine_returns_by_evaluation_or_name(registry: MemoryRegistry) -> None:
    int8, fp8 = registry.judge("int8", 500), registry.judge("fp8", 1000)
    promote(registry, int8)
    with pytest.raises(UserError, match="rollback: champion cannot go back"):
        registry.engines().rollback()
    promote(registry, int8, fp8)
    assert registry.moves[1:] == [("previous", "1"), ("champion", "2")]
    assert "champion already" in promote(registry, fp8).message
    with pytest.raises(GateRefusal, match=r"rollback: version 1 \(int8\) cannot become the champion again: weights: differs"):
        registry.engines(replay=lambda _: [DIFFERS]).rollback()
    assert len(registry.moves) == 3
    assert registry.engines().rollback().champion == "int8"
    assert registry.aliases == {"champion": "1"}
    with pytest.raises(UserError, match="rollback: champion cannot go back"):
        registry.engines().rollback()
    assert promote(registry, int8, fp8).message == "int8 (version 1) is the champion already"
    with pytest.raises(GateRefusal, match=r"fp8: PASS, but it was rolled back at .*: judge it again.*promote\.name='fp8'"):
        promote(registry, fp8)
    assert registry.aliases == {"champion": "1"}
    assert "it had been rolled back at" in promote(registry, fp8, name="fp8").message
    assert registry.aliases == {"champion": "2", "previous": "1"}
    registry.engines().rollback()
    report = load_report(fp8.report.path.parent).model_copy(update={"workloads_digest": "others"})
    fp8.report.path.write_text(report.model_dump_json())
    cited = Cited(path=fp8.report.path, digest=evidence_digest(fp8.report.path))
    again = promote(registry, int8, registry.add(changed(fp8, report=cited)))
    assert again.message.startswith("fp8 (version 3) is the champion")


@pytest.mark.parametrize(
    ("listed", "model", "expected"),
    [
        ({}, "llama", r"version 1 \(fp8\) is of model tiny, not llama"),
        ({"version": ""}, "tiny", "not registered"),
        ({"version": "9"}, "tiny", "version 9 is not in"),
        (
            {"identity": Cited(path=Path("identity.json"), digest="other")},
            "tiny",
            r"version 1 \(fp8\) of .* is another evaluation",
        ),
    ],
)
def test_a_summarys_versions_are_decided_again(
    fp8: Candidate, registry: MemoryRegistry, listed: dict[str, Any], model: str, expected: str
) -> None:
    forged = Cited(path=registry.folder, digest="forged")
    edited = changed(fp8, name="int8", verdict="FAIL", metrics={"memory/max_live_tokens": 1e9}, engine=forged)
    assert promote(registry, edited, edited).candidates == (fp8,)
    with pytest.raises(GateRefusal, match=expected):
        registry.engines().promote([changed(edited, **listed)], model)
    assert len(registry.moves) == 1
