"""stage=verify detects every altered value in a copy of the evidence."""

import json
import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers.registry.evidence_copies import ALL, at, code, places, replaced
from helpers.registry.judged_engine import exported, judged_engine
from helpers.verdicts.reports import CLASSES

from pipeline.evidence.identity import IDENTITY_FILE
from stages.core.records import Sample
from stages.evaluate.inputs import tokens
from stages.verdict.report import REPORT_FILE, SAMPLES_FILE
from stages.workloads.config import WorkloadsConfig

UNUSUAL_VALUES: list[Any] = [None, [], {}, 0, -1, 10**30, 10**400, "x", 1e308, -1e308, math.nan, math.inf]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of an engine and its evidence. A verdict on 60 rows, the first of two rounds, keeps each verification fast."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("helpers.verdicts.reports.CLASSES", dict.fromkeys(CLASSES, 15))
        judged = judged_engine(tmp_path_factory.mktemp("store"), measured={"planned_rounds": 2})
    return exported(judged, tmp_path_factory.mktemp("copies") / "copy", *ALL)


@pytest.fixture
def encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Encode equal samples only once, because that takes most of the time of a verification."""
    cache: dict[str, list[tokens.EncodedSample]] = {}
    encode_rounds = tokens.encode_rounds

    def encode(
        samples: Sequence[Sample], tokenizer: tokens.BundleTokenizer, config: WorkloadsConfig
    ) -> list[tokens.EncodedSample]:
        key = config.model_dump_json()
        if key not in cache:
            cache[key] = encode_rounds(samples, tokenizer, config)
        return cache[key]

    monkeypatch.setattr(tokens, "encode_rounds", encode)


def other_than(value: Any) -> Any:
    """Return a different value: another number or text, or the negation of other types."""
    if isinstance(value, str):
        return f"{value}x"
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value + 1
    return not value


def is_checked(name: str, place: tuple[Any, ...]) -> bool:
    """Return whether to alter a value. Names in an identity may change, and samples.jsonl covers the fields of rows."""
    if name == IDENTITY_FILE:
        return place not in (("kvgate",), ("model",)) and place[-1] not in ("title", "reason")
    return name != REPORT_FILE or place[:2] != ("tests", "control") or len(place) == 2


def alterations(name: str, content: Any, chance: random.Random) -> Iterator[list[tuple[Any, ...]]]:
    """Yield the places to alter together: one place of every field, then each field of a row in all rows."""
    by_field: dict[str, list[tuple[Any, ...]]] = {}
    for place in places(content):
        if isinstance(place[-1], str) and is_checked(name, place):
            by_field.setdefault(place[-1], []).append(place)
    for field_places in by_field.values():
        yield [chance.choice(field_places)]
    if name == SAMPLES_FILE:
        yield from by_field.values()


@pytest.mark.usefixtures("encoded_once")
@pytest.mark.parametrize("name", [IDENTITY_FILE, REPORT_FILE, SAMPLES_FILE])
def test_an_altered_value_is_refused_without_a_crash(small: Path, name: str) -> None:
    """Names, the signer, and gates that give the same verdict may change in a copy.

    Such changes alter the printed digest, and a signature with a trusted key detects them.
    """
    chance, text = random.Random(0), (small / name).read_text()
    original = [json.loads(row) for row in text.splitlines()] if name == SAMPLES_FILE else json.loads(text)
    for altered in alterations(name, original, chance):
        value = at(original, altered[0])
        others = other_than(value), chance.choice([unusual for unusual in UNUSUAL_VALUES if unusual != value])
        for other in others if name == SAMPLES_FILE else [chance.choice(others)]:
            content = replaced(original, altered, other)
            rows = content if name == SAMPLES_FILE else [content]
            (small / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
            assert code(small) in (2, 3, 4) or altered[0][0] in ("gates", "signer"), (altered[0], len(altered), other)
    (small / name).write_text(text)
