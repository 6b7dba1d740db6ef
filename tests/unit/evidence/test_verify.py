"""stage=verify names every altered, exchanged or lost file, digest or verdict, even if it was sealed again or is unreadable."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
from helpers.registry.evidence_copies import ALL, code, edit, member, rekey, replayed, resealed, wrong
from helpers.registry.judged_engine import candidate_of, exported, judged_engine

from pipeline.evidence.identity import IDENTITY_FILE, WORKLOADS_FILE, Role, read_identity, read_lineage
from pipeline.evidence.reading import find_evidence
from stages.core.digest import file_digest, files_digest
from stages.core.errors import GateRefusal, UserError
from stages.verdict.verdict import RULES


def test_an_untouched_engine_verifies_in_its_store_and_as_a_copy(evidence: Path, copy: Path) -> None:
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


def to_bytes(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda copy: (copy / name).write_bytes(content)


def replaced(name: str, old: bytes, new: bytes) -> Callable[[Path], object]:
    return lambda copy: (copy / name).write_bytes((copy / name).read_bytes().replace(old, new))


def removed(*names: str) -> Callable[[Path], object]:
    return lambda copy: [(copy / name).rename(copy.with_name(f"removed{n}")) for n, name in enumerate(names)]


def linked(name: str) -> Callable[[Path], object]:
    """Return a function that moves a part of a copy elsewhere, and links to it."""
    return lambda copy: (copy / name).symlink_to((copy / name).rename(copy.with_name("moved")))


def sealed(role: Role, name: str, content: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """Return a function that changes a file of the engine or the report, and seals it again."""

    def alter(copy: Path) -> None:
        path = (copy / "engine" if role == "engine" else copy) / name
        path.write_bytes(content(path.read_bytes()))
        shutil.rmtree(copy / "baseline")  # optional in copies
        resealed(copy, role, lambda link: link["files"].update({name: file_digest(path)}))

    return alter


def constant(content: bytes) -> Callable[[bytes], bytes]:
    return lambda _: content


def of_another_data_set(report: bytes) -> bytes:
    return json.dumps({**json.loads(report), "workloads_digest": "0" * 64}).encode()


SAMPLES, VERDICT, GARBAGE = "samples, made again", "verdict, decided again", b"\xff\x00{"


@pytest.mark.parametrize(
    ("alter", "differs", "missing"),
    [
        (to_bytes("engine/weights.bin", b"altered"), ["engine: weights.bin"], []),
        (to_bytes("engine/hook.py", b""), ["engine: hook.py"], []),
        (to_bytes("baseline/weights.bin", b"altered"), ["baseline: weights.bin"], []),
        (replaced("report.json", b'"pool_bytes":1', b'"pool_bytes":2'), ["report: report.json"], []),
        (replaced("samples.jsonl", b'te_correct":true', b'te_correct":false'), ["report: samples.jsonl", VERDICT], []),
        (of_identity(lambda identity: identity["verdict"].update(round=2)), [VERDICT], []),
        (of_identity(lambda identity: identity["verdict"].update(status="FAIL")), [VERDICT], []),
        (of_identity(lambda identity: identity["gates"].update(max_mean_kl=0.5)), [VERDICT], []),
        (of_identity(lambda identity: member(identity, "evaluation")["parts"]["config"]["workloads"].update(seed=99)),
         ["chain: evaluate int8", SAMPLES], []),
        (linked("engine/weights.bin"), ["engine: weights.bin"], []),
        (linked("baseline/weights.bin"), ["baseline: weights.bin"], []),
        (linked("report.json"), ["report: report.json"], []),
        (linked("engine"), [], []),
        (removed("baseline"), [], []),
        (removed("engine/weights.bin"), [], ["engine: weights.bin"]),
        (removed("engine", "report.json"), [], ["engine", "report: report.json"]),
        (lambda copy: (removed("engine/weights.bin")(copy), to_bytes("engine/kv_scales.json", b"x")(copy)),
         ["engine: kv_scales.json"], ["engine: weights.bin"]),
        (to_bytes("report.json", GARBAGE), ["report: report.json", "report"], []),
        (to_bytes("samples.jsonl", GARBAGE), ["report: samples.jsonl", "report"], []),
        (to_bytes("engine/tokenizer.json", GARBAGE), ["engine: tokenizer.json"], []),
        (to_bytes("engine/bundle.json", b"[" * 100_000), ["engine: bundle.json"], []),
        (sealed("evaluation", "report.json", of_another_data_set), [SAMPLES], []),
        *((sealed("engine", "tokenizer.json", constant(text)), ["report cites the engine", SAMPLES], [])
          for text in (b"{}", b'{"model": {}}', b"\0", b"[" * 100_000)),
    ],
)  # fmt: skip
def test_every_alteration_is_named_even_if_it_is_sealed_again(
    copy: Path, alter: Callable[[Path], object], differs: list[str], missing: list[str]
) -> None:
    alter(copy)
    assert wrong(copy) == dict.fromkeys(differs, "differs") | dict.fromkeys(missing, "missing")
    assert code(copy) == (3 if differs else 4 if missing else 0)


def test_a_file_added_to_the_engine_is_named_and_not_followed(copy: Path, tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    ("change", "rules"),
    [
        (lambda identity: identity["verdict"].update(rules=RULES - 1), RULES - 1),
        (lambda identity: (identity["gates"].update(min_baseline_accuracy=0.2), identity["verdict"].update(rules=5)), 5),
        (lambda identity: [identity["verdict"].pop(name) for name in ("rules", "round")], 1),  # before rules had a version
    ],
)
def test_a_verdict_by_older_rules_is_refused_for_its_rules(
    evidence: Path, tmp_path: Path, change: Callable[[Any], object], rules: int
) -> None:
    copy = exported(evidence, tmp_path / "identity" / "older", *ALL)
    edit(copy / IDENTITY_FILE, change)
    message = f"version {rules} of the gates' rules decided PASS; .* has version {RULES}, .*judge it again with stage=evaluate"
    with pytest.raises(UserError, match=message):
        replayed(copy)
    assert code(copy) == 2
    with pytest.raises(GateRefusal, match=rf"^version 1 \(int8\): its evidence cannot be read: .*{message}"):
        candidate_of(copy)
    assert read_lineage(copy / IDENTITY_FILE).reads == read_identity(evidence / IDENTITY_FILE).reads


def test_samples_travel_with_evidence_and_links_are_not_read(tmp_path: Path) -> None:
    samples = tmp_path / "mine.jsonl"
    content = '{"prompt": "2 + 2 =", "reference": "4"}\n'
    samples.write_text(content)
    judged = judged_engine(tmp_path / "store", ["workloads=jsonl", f"workloads.jsonl={samples}"])
    copy = exported(judged, tmp_path / "copy", *ALL)
    without_path = exported(judged, tmp_path / "other", *ALL)
    edit(without_path / IDENTITY_FILE, lambda identity: identity.update(workloads_file=None))
    assert wrong(without_path) == {SAMPLES: "differs"}, "a path that the identity names is not opened"
    samples.unlink()
    assert wrong(copy) == {}
    for name in ("workloads", "workloads/mine.jsonl"):
        linked(name)(copy)
        assert wrong(copy) == {SAMPLES: "differs"}
        (copy / name).unlink()
        (tmp_path / "moved").rename(copy / name)
    (copy / "workloads" / "mine.jsonl").write_text('{"prompt": "2 + 3 =", "reference": "5"}\n')
    assert wrong(copy) == {SAMPLES: "differs"}
    (copy / "workloads" / "mine.jsonl").unlink()
    assert wrong(copy) == {SAMPLES: "missing"}
    samples.write_text(content)
    other = tmp_path / "other.jsonl"
    other.write_text(content + "\n")
    samples.rename(tmp_path / "renamed.jsonl")
    assert [code(copy), code(copy, jsonl=str(other)), code(copy, jsonl=str(tmp_path / "renamed.jsonl"))] == [4, 4, 0]
    assert list((copy / "workloads").iterdir()) == [], "a verification writes nothing"


def test_the_users_texts_travel_with_the_evidence_as_one_file(tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    (texts / "more").mkdir(parents=True)
    for name, word in (("b.txt", "one "), ("more/a.md", "two "), ("picture.png", "three ")):
        (texts / name).write_text(word * 300)
    overrides = [
        "workloads=documents",
        f"workloads.documents={texts}",
        "workloads.lengths=[1216]",
        "workloads.length_documents=1",
    ]
    copy = exported(judged_engine(tmp_path / "store", overrides), tmp_path / "copy", *ALL)
    shutil.rmtree(texts)
    assert wrong(copy) == {}
    (copied,) = (copy / "workloads").iterdir()
    assert copied.read_text().split() == ["one"] * 300 + ["two"] * 300
    copied.write_text("other " * 600)
    assert wrong(copy) == {SAMPLES: "differs"}


@pytest.mark.parametrize(
    ("role", "name", "other", "named"),
    [
        ("round", "engine", "baseline", {"chain: round int8 1/1"}),
        ("answers", "baseline", "engine", {"chain: baseline fp16"}),
        ("round", "answers", "baseline", {"chain: evaluate int8"}),
        ("evaluation", "baseline", "engine", {"chain: baseline fp16", "report cites the baseline"}),
        ("engine", "model", None, {"chain: build"}),
        ("answers", "baseline", "", {"chain: baseline fp16"}),
    ],
)
def test_an_exchanged_input_is_named_even_if_sealed_again(
    role: str, name: str, other: Role | Literal[""] | None, named: set[str], copy: Path
) -> None:
    def exchange(identity: Any) -> None:
        evaluation = member(identity, "evaluation")
        inputs = {"round": "round_1", "answers": "answers", "engine": "engine"}
        digest = evaluation["parts"]["inputs"][inputs[role]] if role in inputs else evaluation["digest"]
        (link,) = [link for link in identity["chain"] if link["digest"] == digest]
        if other == "":
            del link["parts"]["inputs"][name]
        else:
            link["parts"]["inputs"][name] = "0" * 64 if other is None else member(identity, other)["digest"]
        rekey(link)

    edit(copy / IDENTITY_FILE, exchange)
    shutil.rmtree(copy / "baseline")  # optional in copies
    assert {name.partition(f" {read_build(copy)}")[0] for name in wrong(copy)} == named


def read_build(copy: Path) -> str:
    """Return an engine's title without `build `: the start of the key of its quantize step."""
    return read_lineage(copy / IDENTITY_FILE).link("engine").title.removeprefix("build ")


def test_an_edited_identity_in_a_store_is_named_by_its_seal(tmp_path: Path) -> None:
    evidence = judged_engine(tmp_path)
    edit(evidence / IDENTITY_FILE, lambda i: i.update(model="another"))
    assert wrong(evidence) == {"identity": "differs"}


@pytest.mark.parametrize("name", ["...", ".a", "a..b"])
def test_a_file_of_questions_may_have_dots_in_its_name(name: str) -> None:
    assert re.fullmatch(WORKLOADS_FILE, f"workloads/{name}")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            lambda i: i["chain"][0]["parts"]["inputs"].update(x=None),
            r"chain\.0\.parts\.inputs\.x: Input should be a valid string",
        ),
        (lambda i: i["chain"][0]["parts"]["config"].update(x=float("nan")), "a number that JSON has no form for"),
        (lambda i: i["chain"][0]["parts"].update(stage="../../../etc"), r"parts\.stage: String should match pattern"),
        (lambda i: i["chain"][0].update(key="../../etc"), r"chain\.0\.key: String should match pattern"),
        *(
            (lambda i, name=name: i.update(workloads_file=name), r"workloads_file: String should match pattern")
            for name in ("../../etc/passwd", "/etc/passwd", "workloads/..", "workloads/a/b")
        ),
    ],
)
def test_an_invalid_identity_is_a_users_error(copy: Path, change: Callable[[Any], None], problem: str) -> None:
    edit(copy / IDENTITY_FILE, change)
    with pytest.raises(UserError, match=problem):
        replayed(copy)
    assert code(copy) == 2


def test_other_broken_identities_are_skipped_unless_relevant(tmp_path: Path) -> None:
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
