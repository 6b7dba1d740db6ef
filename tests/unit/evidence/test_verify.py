"""stage=verify names every altered, exchanged or lost file, digest or verdict, even if it was sealed again or is unreadable."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.registry.evidence_copies import ALL, code, edit, member, rekey, replayed, resealed, wrong
from helpers.registry.judged_engine import candidate_of, exported, judged_engine

from pipeline.evidence.identity import IDENTITY_FILE, Role, read_identity, read_lineage
from pipeline.evidence.reading import find_evidence
from stages.core.digest import file_digest, files_digest
from stages.core.errors import GateRefusal, MissingRequirement, UserError
from stages.verdict.report import SAMPLES_FILE
from stages.verdict.thresholds import RULES


def test_an_untouched_engine_is_the_same_in_its_store_and_copied_out_of_it(evidence: Path, copy: Path) -> None:
    engine = evidence.parent.parent / read_identity(evidence / IDENTITY_FILE).link("engine").place
    assert find_evidence(engine) == [evidence]
    assert wrong(evidence) == wrong(copy) == {}
    assert (code(engine), code(evidence), code(copy)) == (0, 0, 0)
    assert not (copy / "nowhere").exists(), "a verification writes nothing"


def test_the_checkpoint_of_a_gguf_belongs_to_the_chain(tmp_path: Path) -> None:
    evidence = judged_engine(tmp_path, gguf="a1" * 32)
    assert read_identity(evidence / IDENTITY_FILE).sources["gguf"] == "a1" * 32
    assert wrong(evidence) == {}

    def exchange(identity: Any) -> None:
        link = identity["chain"][0]
        assert link["parts"]["stage"] == "checkpoint"
        link["files"] = {"model.safetensors": "b1" * 32}
        link["digest"] = files_digest(link["files"])

    edit(evidence / IDENTITY_FILE, exchange)
    assert {"chain: calibration", "chain: quantize fp16", "chain: quantize int8"} <= wrong(evidence).keys()


def of_identity(change: Callable[[Any], object]) -> Callable[[Path], None]:
    return lambda copy: edit(copy / IDENTITY_FILE, change)


def lose_every_answer(copy: Path) -> None:
    text = (copy / "samples.jsonl").read_text()
    (copy / "samples.jsonl").write_text(text.replace('"candidate_correct":true', '"candidate_correct":false'))


def put_the_engine_in_place_of_the_baseline(copy: Path) -> None:
    shutil.rmtree(copy / "baseline")
    shutil.copytree(copy / "engine", copy / "baseline")


def relax_the_gates(identity: Any) -> None:
    identity["gates"]["max_mean_kl"] *= 2


def ask_by_another_seed(identity: Any) -> None:
    member(identity, "evaluation")["parts"]["config"]["workloads"]["seed"] += 1


@pytest.mark.parametrize(
    ("alter", "named"),
    [
        (lambda copy: (copy / "engine" / "weights.bin").write_text("altered"), ["engine: weights.bin"]),
        (lambda copy: (copy / "engine" / "hook.py").write_text(""), ["engine: hook.py"]),
        (lambda copy: edit(copy / "report.json", lambda r: r["control"].update(factor=2.0)), ["report: report.json"]),
        (lose_every_answer, ["report: samples.jsonl", "verdict, decided again"]),
        (put_the_engine_in_place_of_the_baseline, ["baseline: kv_policy.json", "baseline: kv_scales.json"]),
        (of_identity(lambda identity: identity["verdict"].update(round=2)), ["verdict, decided again"]),
        (of_identity(relax_the_gates), ["verdict, decided again"]),
        (of_identity(ask_by_another_seed), ["chain: evaluate int8", "samples, made again"]),
    ],
)
def test_every_alteration_is_named(copy: Path, alter: Callable[[Path], object], named: list[str]) -> None:
    alter(copy)
    assert wrong(copy) == dict.fromkeys(named, "differs")


def test_rows_without_a_first_round_are_refused_in_one_line(tmp_path: Path) -> None:
    judged = judged_engine(tmp_path / "store", measured={"planned_rounds": 2})
    copy = exported(judged, tmp_path / "copy", *ALL)
    rows = (copy / SAMPLES_FILE).read_text()
    (copy / SAMPLES_FILE).write_text(rows.replace('"round":1', '"round":2'))
    detail = {finding.name: finding.detail for finding in replayed(copy)}["verdict, decided again"]
    reason = "all: samples.jsonl has rounds 2 of 1 to 2; rounds start at 1 and have no gaps"
    assert detail == f"recorded PASS, it is FAIL: {reason}"
    assert code(copy) == 3


def test_any_file_that_was_added_to_the_engine_is_named_and_not_followed(copy: Path, tmp_path: Path) -> None:
    outside, engine = tmp_path / "outside", copy / "engine"
    outside.mkdir()
    (outside / "evil.so").write_text("")
    (engine / ".hidden").mkdir()
    (engine / ".hidden" / "evil.so").write_text("")
    (engine / ".manifest.json").write_text("{}")  # the store writes such a file
    (engine / ".hidden" / ".manifest.json").write_text("{}")
    (engine / "plugins").symlink_to(outside)
    (engine / "dangling").symlink_to("nowhere")
    os.mkfifo(engine / "pipe")
    os.mkfifo(engine / "odd\udcff\n")
    added = (".hidden/.manifest.json", ".hidden/evil.so", "plugins", "dangling", "pipe", r"'odd\udcff\n'")
    assert wrong(copy) == {f"engine: {name}": "differs" for name in added}
    assert code(copy) == 3, "and every name can be printed"


@pytest.mark.parametrize("name", ["engine/weights.bin", "baseline/weights.bin", "report.json"])
def test_a_file_that_became_a_link_to_the_same_bytes_elsewhere_is_named(copy: Path, tmp_path: Path, name: str) -> None:
    (copy / name).rename(tmp_path / "moved")
    (copy / name).symlink_to(tmp_path / "moved")
    what = name.partition("/")[0] if "/" in name else "report"
    assert wrong(copy) == {f"{what}: {Path(name).name}": "differs"}


def test_an_engine_may_be_reached_through_a_link(copy: Path, tmp_path: Path) -> None:
    (copy / "engine").rename(tmp_path / "moved")
    (copy / "engine").symlink_to(tmp_path / "moved")
    assert wrong(copy) == {}


def test_a_file_of_the_engine_that_is_gone_is_named_and_is_something_missing(copy: Path) -> None:
    (copy / "engine" / "weights.bin").unlink()
    assert wrong(copy) == {"engine: weights.bin": "missing"}
    assert code(copy) == 4
    (copy / "engine" / "kv_scales.json").write_text("altered")
    assert code(copy) == 3, "differences weigh more than missing files"


def test_a_verdict_that_the_rows_do_not_give_is_named(tmp_path: Path) -> None:
    copy = exported(judged_engine(tmp_path / "store", copy=100), tmp_path / "copy", *ALL)
    assert read_identity(copy / IDENTITY_FILE).verdict.status == "FAIL"
    assert wrong(copy) == {}, "a refused engine can be verified as well"
    edit(copy / IDENTITY_FILE, lambda i: i["verdict"].update(status="PASS"))
    assert wrong(copy) == {"verdict, decided again": "differs"}


@pytest.mark.parametrize(
    ("change", "rules"),
    [
        (lambda identity: identity["verdict"].update(rules=RULES - 1), RULES - 1),
        (lambda identity: (identity["gates"].update(min_baseline_accuracy=0.2), identity["verdict"].update(rules=5)), 5),
        (lambda identity: [identity["verdict"].pop(name) for name in ("rules", "round")], 1),  # before rules had a version
    ],
)
def test_a_verdict_by_older_rules_is_refused_for_its_rules_whatever_fields_it_has(
    evidence: Path, tmp_path: Path, change: Callable[[Any], object], rules: int
) -> None:
    copy = exported(evidence, tmp_path / "identity" / "older", *ALL)
    edit(copy / IDENTITY_FILE, change)
    said = f"version {rules} of the gates' rules decided PASS; .* has version {RULES}, .*judge it again with stage=evaluate"
    with pytest.raises(UserError, match=said):
        replayed(copy)
    assert code(copy) == 2
    with pytest.raises(GateRefusal, match=rf"^version 1 \(int8\): its evidence cannot be read: .*{said}"):
        candidate_of(copy)
    assert read_lineage(copy / IDENTITY_FILE).reads == read_identity(evidence / IDENTITY_FILE).reads


def test_evidence_without_the_engine_or_its_report_is_missing_something(copy: Path) -> None:
    shutil.rmtree(copy / "engine")
    assert wrong(copy) == {"engine": "missing"}
    (copy / "report.json").unlink()
    assert wrong(copy) == {"engine": "missing", "report: report.json": "missing"}
    assert code(copy) == 4


def test_a_copy_without_its_identity_names_the_missing_file(copy: Path) -> None:
    (copy / IDENTITY_FILE).unlink()
    with pytest.raises(MissingRequirement, match=r"identity\.json is missing, .*run stage=evaluate"):
        find_evidence(copy)


def test_the_users_samples_travel_with_the_evidence_and_are_not_read_through_a_link(tmp_path: Path) -> None:
    samples = tmp_path / "mine.jsonl"
    samples.write_text('{"prompt": "2 + 2 =", "reference": "4"}\n')
    judged = judged_engine(tmp_path / "store", ["workloads=jsonl", f"workloads.jsonl={samples}"])
    copy = exported(judged, tmp_path / "copy", *ALL)
    samples.unlink()
    assert wrong(copy) == {}
    for linked in ("workloads", "workloads/mine.jsonl"):
        (copy / linked).rename(tmp_path / "moved")
        (copy / linked).symlink_to(tmp_path / "moved")
        assert wrong(copy) == {"samples, made again": "differs"}
        (copy / linked).unlink()
        (tmp_path / "moved").rename(copy / linked)
    (copy / "workloads" / "mine.jsonl").write_text('{"prompt": "2 + 3 =", "reference": "5"}\n')
    assert wrong(copy) == {"samples, made again": "differs"}
    (copy / "workloads" / "mine.jsonl").unlink()
    assert wrong(copy) == {"samples, made again": "missing"}


def test_the_users_texts_travel_with_the_evidence_as_one_file(tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    (texts / "more").mkdir(parents=True)
    for name, word in (("b.txt", "one "), ("more/a.md", "two "), ("picture.png", "three ")):
        (texts / name).write_text(word * 300)
    given = ["workloads=documents", f"workloads.documents={texts}", "workloads.lengths=[1216]", "workloads.length_documents=1"]
    copy = exported(judged_engine(tmp_path / "store", given), tmp_path / "copy", *ALL)
    shutil.rmtree(texts)
    assert wrong(copy) == {}
    (copied,) = (copy / "workloads").iterdir()
    assert copied.read_text().split() == ["one"] * 300 + ["two"] * 300
    copied.write_text("other " * 600)
    assert wrong(copy) == {"samples, made again": "differs"}


# --- altered, and sealed again ---------------------------------------------------------------------------------------


def test_a_report_about_another_data_set_is_found_out_even_when_it_is_sealed_again(copy: Path) -> None:
    edit(copy / "report.json", lambda r: r.update(workloads_digest="0" * 64))

    def seal(identity: Any) -> None:
        link = member(identity, "evaluation")
        link["files"]["report.json"] = file_digest(copy / "report.json")
        link["digest"] = files_digest(link["files"])

    edit(copy / IDENTITY_FILE, seal)
    assert wrong(copy) == {"samples, made again": "differs"}


@pytest.mark.parametrize(
    ("role", "name", "other", "named"),
    [
        ("round", "engine", "baseline", {"chain: round int8 1/1"}),
        ("answers", "baseline", "engine", {"chain: baseline fp16"}),
        ("round", "answers", "baseline", {"chain: evaluate int8"}),
        ("evaluation", "baseline", "engine", {"chain: baseline fp16", "report cites the baseline"}),
        ("engine", "model", None, {"chain: build"}),
    ],
)
def test_an_artifact_with_an_exchanged_input_is_named_even_when_it_is_sealed_again(
    role: str, name: str, other: Role | None, named: set[str], copy: Path
) -> None:
    def exchange(identity: Any) -> None:
        evaluation = member(identity, "evaluation")
        inputs = {"round": "round_1", "answers": "answers", "engine": "engine"}
        digest = evaluation["parts"]["inputs"][inputs[role]] if role in inputs else evaluation["digest"]
        (link,) = [link for link in identity["chain"] if link["digest"] == digest]
        link["parts"]["inputs"][name] = "0" * 64 if other is None else member(identity, other)["digest"]
        rekey(link)

    edit(copy / IDENTITY_FILE, exchange)
    shutil.rmtree(copy / "baseline")  # optional in copies
    assert {name.partition(f" {read_build(copy)}")[0] for name in wrong(copy)} == named


def read_build(copy: Path) -> str:
    """Return the part of an engine's title that its key decides."""
    return read_lineage(copy / IDENTITY_FILE).link("engine").title.removeprefix("build ")


def test_an_edited_identity_in_a_store_is_named_by_its_seal(tmp_path: Path) -> None:
    evidence = judged_engine(tmp_path)
    edit(evidence / IDENTITY_FILE, lambda i: i.update(model="another"))
    assert wrong(evidence) == {"identity": "differs"}


@pytest.mark.parametrize("content", ["{}", "[]", '{"model": {}}', "\0", "[" * 100_000])
def test_a_tokenizer_that_cannot_encode_is_named_even_when_it_is_sealed_again(copy: Path, content: str) -> None:
    (copy / "engine" / "tokenizer.json").write_text(content)
    digest = file_digest(copy / "engine" / "tokenizer.json")
    resealed(copy, "engine", lambda link: link["files"].update({"tokenizer.json": digest}))
    assert wrong(copy)["samples, made again"] == "differs"
    assert code(copy) == 3


def test_samples_of_a_path_that_an_identity_names_are_not_opened(copy: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("root:x:0:0\n")
    resealed(copy, "evaluation", lambda link: link["parts"]["config"]["workloads"].update(jsonl=str(secret)))
    finding = {finding.name: finding for finding in replayed(copy)}["samples, made again"]
    assert finding.status == "differs"
    assert "the evidence has no copy" in finding.detail
    assert not any("root" in finding.detail for finding in replayed(copy))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            lambda i: i["chain"][0]["parts"]["inputs"].update(x=None),
            r"chain\.0\.parts\.inputs\.x: Input should be a valid string",
        ),
        (lambda i: i["chain"][0]["parts"]["inputs"].update(x=5), r"parts\.inputs\.x: Input"),
        (lambda i: i["chain"][0]["parts"]["inputs"].update(x=["y"]), r"parts\.inputs\.x: Input"),
        (lambda i: i["chain"][0]["parts"]["libraries"].update(x=5), r"parts\.libraries\.x: Input"),
        (lambda i: i["chain"][0]["parts"]["config"].update(x=float("nan")), "a number that JSON has no form for"),
        (lambda i: i["chain"][0]["parts"].update(stage="../../../etc"), r"parts\.stage: String should match pattern"),
        (lambda i: i["chain"][0].update(key="../../etc"), r"chain\.0\.key: String should match pattern"),
        *(
            (lambda i, name=name: i.update(workloads_file=name), r"workloads_file: .*must be null or workloads/NAME")
            for name in ("../../etc/passwd", "/etc/passwd", "workloads/..", "workloads/../../x", "workloads/", "workloads/a/b")
        ),
    ],
)
def test_an_identity_of_other_types_or_with_paths_elsewhere_is_a_users_error(
    copy: Path, change: Callable[[Any], None], problem: str
) -> None:
    edit(copy / IDENTITY_FILE, change)
    with pytest.raises(UserError, match=problem):
        replayed(copy)
    assert code(copy) == 2


def test_files_that_cannot_be_read_are_named_and_never_a_defect(copy: Path) -> None:
    bundle = (copy / "engine" / "bundle.json").read_bytes()
    for name in ("report.json", "samples.jsonl", "engine/bundle.json", "engine/tokenizer.json"):
        kept = (copy / name).read_bytes()
        (copy / name).write_bytes(b"\xff\x00{")
        assert code(copy) == 3, name
        (copy / name).write_bytes(kept)
    (copy / "engine" / "bundle.json").write_text("[" * 100_000)
    assert code(copy) == 3
    (copy / "engine" / "bundle.json").write_bytes(bundle)
    assert code(copy) == 0


def test_another_engines_broken_identity_is_passed_over_unless_it_may_be_the_one(tmp_path: Path) -> None:
    evidence = judged_engine(tmp_path)
    engine = tmp_path / read_identity(evidence / IDENTITY_FILE).link("engine").place
    broken = evidence.with_name("0" * 32)
    broken.mkdir()
    (broken / IDENTITY_FILE).write_text("{")
    assert find_evidence(engine) == [evidence]
    assert code(engine) == 0
    shutil.rmtree(evidence)
    with pytest.raises(UserError, match=rf"about it, and one cannot be read: {broken / IDENTITY_FILE}: the file: Invalid JSON"):
        find_evidence(engine)
