import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.artifacts.digest import file_digest, files_digest, tree_files
from pipeline.core.errors import GateRefusal, UserError
from pipeline.registry.promotion import choose, evidence_digest, promote, rollback
from pipeline.registry.summary import Candidate


class Memory:
    """A registry in memory that records the order of alias moves."""

    def __init__(self, folder: Path) -> None:
        self.lock = folder / "lock"
        self.aliases: dict[str, str] = {}
        self.versions: dict[str, dict[str, str]] = {}
        self.moves: list[tuple[str, str]] = []

    def alias(self, alias: str) -> str | None:
        return self.aliases.get(alias)

    def set_alias(self, alias: str, version: str) -> None:
        self.moves.append((alias, version))
        self.aliases[alias] = version

    def delete_alias(self, alias: str) -> None:
        del self.aliases[alias]

    def tags(self, version: str) -> dict[str, str] | None:
        return self.versions.get(version)

    def set_tags(self, version: str, tags: Mapping[str, str]) -> None:
        self.versions[version].update(tags)


def passes(_report: dict[str, Any], _rows: list[dict[str, Any]]) -> tuple[str, list[str]]:
    return "PASS", []


@pytest.fixture
def registry(tmp_path: Path) -> Memory:
    return Memory(tmp_path)


def make(folder: Path, registry: Memory, kv: str, *, kib: float = 2.0, kl: float = 0.1, verdict: str = "PASS") -> Candidate:
    """A registered candidate with a baseline, an engine and a report on disk."""
    engine, baseline, evidence = (folder / "engines" / kv, folder / "engines" / "fp16", folder / "reports" / kv)
    for path in (engine, baseline, evidence):
        path.mkdir(parents=True, exist_ok=True)
    (baseline / "bundle.json").write_text("fp16")
    (engine / "bundle.json").write_text(kv)
    engine_digest, baseline_digest = (files_digest(tree_files(path)) for path in (engine, baseline))
    cited = {"engine_digest": engine_digest, "baseline_digest": baseline_digest}
    (evidence / "report.json").write_text(json.dumps(cited))
    (evidence / "samples.jsonl").write_text('{"id": "a"}\n')
    paths = evidence / "report.json", evidence / "samples.jsonl"
    report_digest = evidence_digest(*paths)
    identity = evidence / "identity.json"
    identity.write_text(kv)
    cited_digests = {"report_digest": report_digest, "identity_digest": file_digest(identity)}
    version = str(len(registry.versions) + 1)
    registry.versions[version] = {**cited, **cited_digests, "kv": kv}
    metrics = {"quality/kl_mean": kl, "memory/max_live_tokens": 1e6 / kib}
    return Candidate(
        kv, verdict, ("mean KL",) if verdict != "PASS" else (), kib, metrics,
        engine_digest, baseline_digest, report_digest, str(engine), str(baseline), *map(str, paths), model_version=version,
        identity_digest=file_digest(identity), identity_path=str(identity),
    )  # fmt: skip


def test_the_smallest_cache_that_passed_becomes_champion(tmp_path: Path, registry: Memory) -> None:
    candidates = [
        make(tmp_path, registry, "int8", kib=2.06),
        make(tmp_path, registry, "fp8k_int4v", kib=1.56),
        make(tmp_path, registry, "int4", kib=1.06, verdict="FAIL"),
        make(tmp_path, registry, "int4_g32", kib=1.1, verdict="INCONCLUSIVE"),
    ]
    move = promote(candidates, registry, passes, sweep="s1")
    assert (move.champion, move.version, move.changed) == ("fp8k_int4v", "2", True)
    assert registry.aliases == {"champion": "2"}
    assert registry.versions["2"]["promoted_by_sweep"] == "s1"
    assert candidates[1].engine_digest in registry.versions["2"]["evidence"]


def test_a_tie_goes_to_the_lower_mean_kl_and_a_missing_one_loses(tmp_path: Path, registry: Memory) -> None:
    better, worse = make(tmp_path, registry, "a", kl=0.01), make(tmp_path, registry, "z", kl=0.02)
    unknown = replace(worse, kv="zz", metrics={**worse.metrics, "quality/kl_mean": None})
    assert choose([worse, unknown, better]).kv == "a"


def test_live_tokens_decide_and_not_the_bytes_of_a_token(tmp_path: Path, registry: Memory) -> None:
    # exact sink and recent tokens cost memory per sequence, which KiB per token does not show
    small = replace(make(tmp_path, registry, "small", kib=1.0), metrics={"memory/max_live_tokens": 10.0})
    roomy = replace(make(tmp_path, registry, "roomy", kib=1.1), metrics={"memory/max_live_tokens": 12.0})
    unknown = replace(make(tmp_path, registry, "unknown", kib=0.5), metrics={})
    assert choose([small, roomy, unknown]).kv == "roomy"


def test_nothing_is_promoted_when_none_passed_and_each_reason_is_told(tmp_path: Path, registry: Memory) -> None:
    with pytest.raises(GateRefusal, match=r"int4: FAIL \(mean KL\)"):
        promote([make(tmp_path, registry, "int4", verdict="FAIL")], registry, passes, sweep="s")
    with pytest.raises(GateRefusal, match="there is no candidate"):
        promote([], registry, passes, sweep="s")


def test_promote_refuses_when_the_engine_on_disk_changed(tmp_path: Path, registry: Memory) -> None:
    candidate = make(tmp_path, registry, "fp8")
    (Path(candidate.engine_path) / "bundle.json").write_text("another")
    with pytest.raises(GateRefusal, match=r"the engine in .* has digest"):
        promote([candidate], registry, passes, sweep="s")
    assert registry.moves == []


def test_promote_refuses_when_baseline_digest_differs(tmp_path: Path, registry: Memory) -> None:
    candidate = make(tmp_path, registry, "fp8")
    (Path(candidate.baseline_path) / "extra").write_text("x")
    with pytest.raises(GateRefusal, match=r"the baseline in .* has digest"):
        promote([candidate], registry, passes, sweep="s")


@pytest.mark.parametrize("field", ["engine_digest", "baseline_digest"])
def test_promote_refuses_a_report_about_something_else(tmp_path: Path, registry: Memory, field: str) -> None:
    candidate = make(tmp_path, registry, "fp8")
    report = Path(candidate.report_path)
    report.write_text(json.dumps({**json.loads(report.read_text()), field: "other"}))
    digest = evidence_digest(report, Path(candidate.samples_path))
    registry.versions["1"]["report_digest"] = digest
    with pytest.raises(GateRefusal, match=r"about another engine|with another baseline"):
        promote([replace(candidate, report_digest=digest)], registry, passes, sweep="s")


def test_promote_refuses_an_identity_that_was_edited_is_gone_or_is_not_registered(tmp_path: Path, registry: Memory) -> None:
    candidate = make(tmp_path, registry, "fp8")
    registry.versions["1"]["identity_digest"] = "other"
    with pytest.raises(GateRefusal, match="version 1 cites another identity_digest"):
        promote([candidate], registry, passes, sweep="s")
    Path(candidate.identity_path).write_text("edited")
    with pytest.raises(GateRefusal, match=r"identity\.json is not the identity that the candidate cites"):
        promote([candidate], registry, passes, sweep="s")
    Path(candidate.identity_path).unlink()
    with pytest.raises(GateRefusal, match=r"its identity .* is gone"):
        promote([candidate], registry, passes, sweep="s")


def test_promote_refuses_evidence_that_was_edited_or_is_gone(tmp_path: Path, registry: Memory) -> None:
    candidate = make(tmp_path, registry, "fp8")
    Path(candidate.samples_path).write_text('{"id": "b"}\n')
    with pytest.raises(GateRefusal, match=r"the report in .* has digest"):
        promote([candidate], registry, passes, sweep="s")
    gone = replace(candidate, report_path=str(tmp_path / "nowhere"))
    with pytest.raises(GateRefusal, match=r"its evidence .*nowhere is gone"):
        promote([gone], registry, passes, sweep="s")


def test_promote_reads_samples_whose_texts_hold_unicode_line_separators(tmp_path: Path, registry: Memory) -> None:
    candidate = make(tmp_path, registry, "fp8")
    text = "a\u2028b\u2029c\x85d"
    Path(candidate.samples_path).write_text(json.dumps({"id": text}, ensure_ascii=False) + "\n", encoding="utf-8")
    digest = evidence_digest(Path(candidate.report_path), Path(candidate.samples_path))
    registry.versions["1"]["report_digest"] = digest
    seen: list[dict[str, Any]] = []

    def decide(_report: dict[str, Any], rows: list[dict[str, Any]]) -> tuple[str, list[str]]:
        seen.extend(rows)
        return "PASS", []

    promote([replace(candidate, report_digest=digest)], registry, decide, sweep="s")
    assert seen == [{"id": text}]


@pytest.mark.parametrize("verdict", ["FAIL", "INCONCLUSIVE"])
def test_promote_decides_again_and_believes_no_claimed_pass(tmp_path: Path, registry: Memory, verdict: str) -> None:
    candidate = make(tmp_path, registry, "fp8")

    def says_no(report: dict[str, Any], rows: list[dict[str, Any]]) -> tuple[str, list[str]]:
        assert report["engine_digest"] == candidate.engine_digest
        assert rows == [{"id": "a"}]
        return verdict, ["mean KL too high"]

    with pytest.raises(GateRefusal, match=f"it is {verdict}: mean KL too high"):
        promote([candidate], registry, says_no, sweep="s")


def test_promote_refuses_what_the_registry_does_not_know_or_knows_otherwise(tmp_path: Path, registry: Memory) -> None:
    candidate = make(tmp_path, registry, "fp8")
    with pytest.raises(GateRefusal, match="not registered"):
        promote([replace(candidate, model_version=None)], registry, passes, sweep="s")
    with pytest.raises(GateRefusal, match="version 9 is not in the registry"):
        promote([replace(candidate, model_version="9")], registry, passes, sweep="s")
    registry.versions["1"]["report_digest"] = "other"
    with pytest.raises(GateRefusal, match="version 1 cites another report_digest"):
        promote([candidate], registry, passes, sweep="s")


def test_previous_is_set_before_champion_moves(tmp_path: Path, registry: Memory) -> None:
    one, two = make(tmp_path, registry, "int8"), make(tmp_path, registry, "fp8")
    promote([one], registry, passes, sweep="s1")
    registry.moves.clear()
    move = promote([two], registry, passes, sweep="s2")
    assert registry.moves == [("previous", "1"), ("champion", "2")]
    assert move.previous == "1"


def test_promoting_the_champion_again_moves_nothing(tmp_path: Path, registry: Memory) -> None:
    one, two = make(tmp_path, registry, "int8"), make(tmp_path, registry, "fp8")
    promote([one], registry, passes, sweep="s1")
    promote([two], registry, passes, sweep="s2")
    registry.moves.clear()
    move = promote([two], registry, passes, sweep="s3")
    assert not move.changed
    assert "champion already" in move.message
    assert registry.moves == []
    assert registry.aliases == {"champion": "2", "previous": "1"}


def test_promotion_after_an_interrupted_one_repairs_the_aliases(tmp_path: Path, registry: Memory) -> None:
    one, two = make(tmp_path, registry, "int8"), make(tmp_path, registry, "fp8")
    promote([one], registry, passes, sweep="s1")
    registry.aliases["previous"] = "1"  # killed between the two moves
    with pytest.raises(UserError, match="no previous champion"):
        rollback(registry)
    promote([two], registry, passes, sweep="s2")
    assert registry.aliases == {"champion": "2", "previous": "1"}


def test_losing_a_race_against_another_host_is_noticed(tmp_path: Path, registry: Memory) -> None:
    candidate = make(tmp_path, registry, "fp8")

    class Raced(Memory):
        def set_alias(self, alias: str, version: str) -> None:
            super().set_alias(alias, version)
            self.aliases["champion"] = "another"

    raced = Raced(tmp_path)
    raced.versions = registry.versions
    with pytest.raises(GateRefusal, match="another host moved the aliases"):
        promote([candidate], raced, passes, sweep="s")


def test_rollback_brings_the_previous_champion_back_once(tmp_path: Path, registry: Memory) -> None:
    for kv in ("int8", "fp8"):
        promote([make(tmp_path, registry, kv)], registry, passes, sweep=kv)
    move = rollback(registry)
    assert (move.champion, move.version) == ("int8", "1")
    assert registry.aliases == {"champion": "1"}
    assert "rolled_back_at" in registry.versions["2"]
    with pytest.raises(UserError, match="no previous champion"):
        rollback(registry)


def test_rollback_without_a_champion_is_an_error(registry: Memory) -> None:
    with pytest.raises(UserError, match="no previous champion"):
        rollback(registry)


def test_promoting_what_was_rolled_back_says_so(tmp_path: Path, registry: Memory) -> None:
    one, two = make(tmp_path, registry, "int8"), make(tmp_path, registry, "fp8")
    promote([one], registry, passes, sweep="s1")
    promote([two], registry, passes, sweep="s2")
    rollback(registry)
    move = promote([two], registry, passes, sweep="s3")
    assert "it had been rolled back at" in move.message
    assert registry.aliases == {"champion": "2", "previous": "1"}
