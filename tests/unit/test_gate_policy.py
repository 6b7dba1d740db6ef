"""The gate policy: what it refuses, and that it stays with the model until somebody asks for a looser one, which is noted."""

from pathlib import Path
from typing import Any

import pytest
from gate_reports import GATES, answered, every_class, gates, report
from judged_candidates import MemoryRegistry, decide_pass, judged_candidate, replay_without_findings
from refusals import refused
from signing_keys import key_pair

from pipeline.config.compose import plan
from pipeline.core.errors import GateRefusal, UserError
from pipeline.registry.promotion import promote
from pipeline.run.inputs import check_inputs
from pipeline.trust.movelog import MoveLog
from pipeline.trust.policy import GatePolicy, kept, read_policy, settle, standing_policy
from pipeline.verdict.coverage import Exercised
from pipeline.verdict.gates import Gates, decide
from pipeline.verdict.thresholds import Verdict

STRICT = """
gates: {margin: 0.05, margins: {retrieval: 0.02}, alpha: 0.05, max_mean_kl: 0.05, min_samples: 15, allow_scale_changes: []}
min_samples: 64
required_workloads: [retrieval, copy]
"""


def given(folder: Path, text: str) -> GatePolicy:
    path = folder / "policy.yaml"
    path.write_text(text)
    policy = read_policy(str(path))
    assert policy is not None
    return policy


def decided(policy: GatePolicy, thresholds: Gates, rows: Any, **measured: Any) -> Verdict:
    return kept(policy, thresholds, decide_pass)(report(rows, **measured), rows)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"margin": 0.9}, "gates.margin=0.9 is looser than 0.05"),
        ({"margins": {"copy": 0.1}}, "gates.margins.copy=0.1 is looser than 0.05"),
        ({"margin": 0.03}, "gates.margins.retrieval=0.03 is looser than 0.02"),
        ({"alpha": 0.2}, "gates.alpha=0.2 is looser than 0.05"),
        ({"min_samples": 4}, "gates.min_samples=4 is looser than 15"),
        ({"max_mean_kl": 1.0}, "gates.max_mean_kl=1 is looser than 0.05"),
        ({"allow_scale_changes": ("missing",)}, r"gates.allow_scale_changes=\[missing\] is looser than \[\]"),
    ],
)
def test_gates_that_are_looser_than_the_policy_are_refused_by_key(
    tmp_path: Path, changes: dict[str, Any], expected: str
) -> None:
    policy = given(tmp_path, STRICT)
    allowed = {"margins": {"retrieval": 0.02}}
    assert decided(policy, gates(**allowed), every_class()).status == "PASS"
    with pytest.raises(GateRefusal, match=f"the gate policy of the registered model: .*{expected}"):
        decided(policy, gates(**{**(allowed if "margin" not in changes else {}), **changes}), every_class())


def test_four_samples_and_a_margin_of_ninety_points_pass_the_gates_and_not_the_policy(tmp_path: Path) -> None:
    rows, loose = answered("retrieval", 4), gates(margin=0.9, min_samples=1, max_ruined_share=0.9)
    policy = given(tmp_path, "min_samples: 64\nrequired_workloads: [retrieval, copy]\ncovered: {tokens: 1024, batch: 8}")
    said = decided(policy, loose, rows)
    assert said.status == "INCONCLUSIVE"
    assert said.reasons == [
        "copy was not judged, and the gate policy requires it",
        "retrieval: 4 samples, and the gate policy wants 64",
        "it does not say how far it holds, and the gate policy wants up to 1,024 tokens, batch 8",
    ]


def test_a_policy_wants_a_verdict_that_holds_far_enough(tmp_path: Path) -> None:
    policy = given(tmp_path, "covered: {tokens: 1000, batch: 16}")
    for tokens, batch, status in ((1000, 16, "PASS"), (999, 16, "INCONCLUSIVE"), (1000, 15, "INCONCLUSIVE")):
        coverage = Exercised(longest_context=tokens, batch=batch)
        assert decided(policy, GATES, every_class(), coverage=coverage).status == status


def test_texts_without_answers_count_by_document(tmp_path: Path) -> None:
    rows = [row.model_copy(update={"judged": False, "document": "one"}) for row in every_class()]
    assert decided(given(tmp_path, "min_samples: 2"), GATES, rows).reasons == ["all: 1 samples, and the gate policy wants 2"]


def test_a_policy_turns_no_failure_into_anything_else(tmp_path: Path) -> None:
    rows = every_class(copy=60)
    failed = kept(given(tmp_path, "min_samples: 1000"), GATES, lambda r, s: decide(r, s, GATES))(report(rows), rows)
    assert failed.status == "FAIL"


BAD = (
    "- a",
    "gates: {margin: .nan}",
    "gates: {margin: 2}",
    "gates: {margins: {'a b': 0.1}}",
    "gates: {margin: 0.1, margin: 0.9}",
    "gates: {max_mean_kl: 1e999}",
    "gates: {marginn: 0.1}",
    "min_samples: 0",
    "min_samples: '64'",
    "min_samples: 1000000000000000000000",
    "required_workloads: retrieval",
    "covered: {tokens: -1}",
    "covered: 5",
    "signers: [key.pem]",
    "signers: ['-----BEGIN PUBLIC KEY-----\n-----END PUBLIC KEY-----']",
    "signers: ['-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----']",
    "signers: ['-----BEGIN PRIVATE KEY-----\nc2VjcmV0\n-----END PRIVATE KEY-----']",
    "[",
    "{",
    "\x00",
    "a: ${oc.env:HOME}",
    "required_workloads: [" + ", ".join(f"w{number}" for number in range(2000)) + "]",
)


@pytest.mark.parametrize("text", BAD, ids=range(len(BAD)))
def test_a_policy_that_cannot_be_meant_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    with refused(UserError, f"promote.policy={tmp_path}/policy.yaml: ") as caught:
        given(tmp_path, text)
    assert "c2VjcmV0" not in str(caught.value)


def test_a_policy_file_is_looked_at_before_any_work_and_by_promotions_alone(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", tmp_path):
        (job,) = plan(["stage=promote", f"promote.policy={path}", f"workdir={tmp_path}"], multirun=False).jobs
        with pytest.raises(UserError, match=r"promote\.policy=.*: cannot be read"):
            check_inputs(job)
    with pytest.raises(UserError, match=r"promote\.policy=a: only stage=promote and stage=all read it"):
        plan(["stage=rollback", "promote.policy=a"], multirun=False)
    with pytest.raises(UserError, match=r"promote\.name=a: only stage=promote reads it"):
        plan(["promote.name=a"], multirun=False)


def test_a_policy_stays_with_the_model_and_becomes_looser_only_where_that_is_asked_for(tmp_path: Path) -> None:
    log = MoveLog(MemoryRegistry(tmp_path))
    assert settle(log, None, loosen=False) is None
    strict = given(tmp_path, STRICT)
    assert settle(log, strict, loosen=False) == strict
    assert settle(log, None, loosen=False) == strict, "a promotion elsewhere, without the file"
    assert settle(log, strict, loosen=False) == strict
    stricter = given(tmp_path, STRICT.replace("min_samples: 64", "min_samples: 100"))
    assert settle(log, stricter, loosen=False) == stricter
    loose = given(tmp_path, "gates: {margin: 0.9}")
    with pytest.raises(GateRefusal, match=r"looser .*: gates\.alpha, .*gates\.margin, .*promote\.loosen_policy=true"):
        settle(log, loose, loosen=False)
    assert settle(log, None, loosen=False) == stricter
    assert settle(log, loose, loosen=True) == loose
    history = log.read()
    assert [record.kind for record in history.records] == ["policy"] * 3
    assert "the first one" in history.records[0].why
    assert "no looser than before" in history.records[1].why
    assert "looser: gates.alpha" in history.records[2].why


def pem(folder: Path, name: str) -> str:
    return key_pair(folder, name)[1].read_text().strip().replace("\n", "\\n")


def test_each_way_of_being_looser_is_named(tmp_path: Path) -> None:
    one, two = pem(tmp_path, "one"), pem(tmp_path, "two")
    pairs = [
        ("gates: {min_samples: 15}", "gates: {min_samples: 14}", ["gates.min_samples"]),
        ("gates: {margin: 0.05}", "gates: {margin: 0.05, margins: {copy: 0.1}}", ["gates.margins.copy"]),
        ("gates: {margin: 0.05}", "gates: {margin: 0.05, margins: {copy: 0.01}}", []),
        ("gates: {allow_scale_changes: []}", "gates: {allow_scale_changes: [merged]}", ["gates.allow_scale_changes"]),
        ("min_samples: 4", "{}", ["min_samples"]),
        ("required_workloads: [a, b]", "required_workloads: [b, c]", ["required_workloads"]),
        ("covered: {tokens: 9, batch: 2}", "covered: {tokens: 99}", ["covered"]),
        ("covered: {tokens: 9}", "{}", ["covered"]),
        (f'signers: ["{one}"]', f'signers: ["{one}", "{two}"]', ["signers"]),
        (f'signers: ["{one}"]', "{}", ["signers"]),
        (f'signers: ["{one}", "{two}"]', f'signers: ["{two}"]', []),
        ("{}", f'signers: ["{two}"]', []),
    ]
    for before, after, expected in pairs:
        assert given(tmp_path, after).loosens(given(tmp_path, before)) == expected, (before, after)


def test_a_policy_whose_content_was_altered_or_removed_promotes_nothing(tmp_path: Path) -> None:
    registry = MemoryRegistry(tmp_path)
    log = MoveLog(registry)
    settle(log, given(tmp_path, STRICT), loosen=False)
    (tag,) = (name for name in registry.model if name.startswith("gate-policy-"))
    for altered in ('{"min_samples":1}', "{}"):
        registry.model[tag] = altered
        with pytest.raises(GateRefusal, match="is not the one that the log of moves binds"):
            standing_policy(log, log.read())
    del registry.model[tag]
    with pytest.raises(GateRefusal, match="is not the one that the log of moves binds"):
        settle(log, None, loosen=False)
    settle(log, given(tmp_path, STRICT), loosen=False)
    assert standing_policy(log, log.read()) is not None


def test_the_version_says_under_which_policy_it_was_promoted(tmp_path: Path) -> None:
    registry = MemoryRegistry(tmp_path)
    log = MoveLog(registry)
    settle(log, given(tmp_path, STRICT), loosen=False)
    candidate = registry.add(judged_candidate(tmp_path, "fp8", metrics={"memory/max_live_tokens": 1.0}))
    promote([candidate], log, replay_without_findings, decide_pass, sweep="s")
    assert registry.versions["1"]["promoted_under"] == log.read().policy
    assert registry.versions["1"]["promoted_by"]
