"""Evidence with absurd contents is named by stage=verify, and never causes a defect."""

import json
import math
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from evidence_copies import at, code, edit, leaves, replaced, replayed
from judged_engine import judged_engine

from pipeline.evidence.identity import IDENTITY_FILE, read_identity
from pipeline.evidence.reading import find_evidence
from stages.core.errors import UserError
from stages.verdict.report import REPORT_FILE, SAMPLES_FILE


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


def other_than(value: Any) -> Any:
    """Return another number or text; for other types, return whether the value is falsy."""
    if isinstance(value, str):
        return f"{value}x"
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value + 1
    return not value


def names_only(place: tuple[Any, ...]) -> bool:
    """Return whether a value of an identity is only a name."""
    return place in (("kvgate",), ("model",)) or place[-1] in ("title", "reason")


STRANGE: list[Any] = [None, [], {}, 0, -1, 10**30, 10**400, "x", 1e308, -1e308, math.nan, math.inf]


@pytest.mark.parametrize("name", [IDENTITY_FILE, REPORT_FILE, SAMPLES_FILE])
def test_a_value_that_is_altered_or_strange_is_noticed_and_never_a_defect(copy: Path, name: str) -> None:
    """Only values that name the identity itself may change unnoticed in a copy. They change the digest, which is shown."""
    chance, text = random.Random(0), (copy / name).read_text()
    original = [json.loads(row) for row in text.splitlines()] if name == SAMPLES_FILE else json.loads(text)
    places = sorted({place[:depth] for place in leaves(original) for depth in range(1, len(place) + 1)}, key=str)
    for place in chance.sample([place for place in places if name != IDENTITY_FILE or not names_only(place)], 16):
        value = at(original, place)
        altered = chance.choice((other_than(value), chance.choice([strange for strange in STRANGE if strange != value])))
        content = replaced(original, place, altered)
        rows = content if name == SAMPLES_FILE else [content]
        (copy / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        assert code(copy) in (2, 3, 4), (place, altered)
