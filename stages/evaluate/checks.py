"""Judging a generated answer: strictly, on the whole text, never a substring of it."""

import json
from dataclasses import dataclass
from typing import Any

from pipeline.core.records import Sample


class _Rejected(ValueError):
    """The text is not strict JSON."""


@dataclass(frozen=True)
class Judgement:
    """Whether the answer has the right form (None where every text has) and whether it is the right answer."""

    valid: bool | None
    correct: bool


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _Rejected("a key occurs twice")
    return found


def _no_constant(name: str) -> None:
    raise _Rejected(f"{name} is not JSON")


def strict_json(text: str) -> Any:
    """The value of `text`, all of which must be one JSON value without duplicate keys, NaN or Infinity.

    Raises:
        ValueError: when it is not.
    """
    return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)


def _canonical(value: Any) -> str:
    """Equal for equal JSON values only: 1, 1.0, true and "1" differ, the order of keys does not matter."""
    return json.dumps(value, sort_keys=True)


def _accepted(call: Any, tools: tuple[tuple[str, tuple[str, ...]], ...]) -> bool:
    """Whether `call` is {"name", "arguments"} of a declared tool with exactly its arguments."""
    if not isinstance(call, dict) or set(call) != {"name", "arguments"} or not isinstance(call["arguments"], dict):
        return False
    return any(call["name"] == name and set(call["arguments"]) == set(arguments) for name, arguments in tools)


def judge(sample: Sample, text: str) -> Judgement:
    """Judge `text` as the answer to `sample`, whose check must not be "none"."""
    assert sample.check != "none", "prose has no right answer"
    if sample.check == "exact":
        return Judgement(valid=None, correct=text == sample.reference)
    try:
        value = strict_json(text)
    except (ValueError, RecursionError):
        return Judgement(valid=False, correct=False)
    valid = sample.check == "json" or _accepted(value, sample.tools)
    return Judgement(valid=valid, correct=valid and _canonical(value) == _canonical(strict_json(sample.reference)))
