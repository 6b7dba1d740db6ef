"""Judges generated answers. All checks but "mention" are strict: the whole text counts, never a substring of it.

"mention" is for models that know the answer and phrase it in their own way: "The code is 4711." gives the reference "4711".
It compares words, see `words_of`.
"""

import json
import re
import unicodedata
from dataclasses import dataclass
from typing import Any

from pipeline.core.records import Sample
from pipeline.core.strict import unique_keys
from stages.workloads.gsm8k import final_number


@dataclass(frozen=True)
class Judgement:
    """The judgement of one answer."""

    valid: bool | None
    """Whether the answer has the required form; None where every text has it."""
    correct: bool
    """Whether the answer is the right one."""


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def strict_json(text: str) -> Any:
    """Parse `text`, all of which must be one JSON value without duplicate keys, NaN or Infinity.

    Raises:
        ValueError: The text is anything else.
    """
    return json.loads(text, object_pairs_hook=unique_keys, parse_constant=_refuse_constant)


def _canonical(value: Any) -> str:
    """Return a text that is equal for equal JSON values only.

    JSON has one type of numbers: 12, 12.0 and 1.2e1 are equal. 1, true and "1" differ. The order of keys is ignored.
    """
    return json.dumps(_whole(value), sort_keys=True)


def _whole(value: Any) -> Any:
    """Return a JSON value with integers in place of floats that are whole."""
    match value:
        case float() if value.is_integer():
            return int(value)
        case list():
            return [_whole(inner) for inner in value]
        case dict():
            return {key: _whole(inner) for key, inner in value.items()}
    return value


_WORD = re.compile(r"(?:(?<!\w)-(?=\d))?\w+(?:[.,:/@-]\w+)*")


def words_of(text: str) -> tuple[str, ...]:
    """Return the words that check "mention" compares, case-folded and in Unicode's compatibility form (NFKC).

    A word is a run of letters and digits, with whatever `. , : / @ -` stands inside it and a sign before its digits, so that
    the number 93.10 mentions neither 93 nor 10, and -5 not 5. All other punctuation and all whitespace only separate words.
    """
    return tuple(_WORD.findall(unicodedata.normalize("NFKC", text).casefold()))


def mentions(text: tuple[str, ...], phrase: tuple[str, ...]) -> bool:
    """Return whether the words of `phrase` stand in `text`, one after the other."""
    return any(text[i : i + len(phrase)] == phrase for i in range(len(text) - len(phrase) + 1))


def _mentions_the_answer_only(sample: Sample, text: str) -> bool:
    words = words_of(text)
    wrong = any(mentions(words, words_of(distractor)) for distractor in sample.distractors)
    return not wrong and all(mentions(words, words_of(phrase)) for phrase in sample.mentions or (sample.reference,))


def calls_declared_tool(call: Any, tools: tuple[tuple[str, tuple[str, ...]], ...]) -> bool:
    """Return whether `call` is {"name", "arguments"} of a declared tool with exactly that tool's arguments."""
    if not isinstance(call, dict) or set(call) != {"name", "arguments"} or not isinstance(call["arguments"], dict):
        return False
    return any(call["name"] == name and set(call["arguments"]) == set(arguments) for name, arguments in tools)


def judge(sample: Sample, text: str) -> Judgement:
    """Judge a generated text.

    Args:
        sample: The sample that was asked. Its check must not be "none".
        text: The whole generated answer, without the stop token.

    Returns:
        For check "exact": correct when `text` is the reference, character by character. For "mention": correct when `text`
        mentions all of `sample.mentions`, or the reference where there are none, and none of `sample.distractors`. For "json"
        and "tool_call": valid when `text` is strict JSON (and calls a declared tool), correct when its value is the
        reference's. For "number": correct when `text` ends with the
        reference's number.
    """
    assert sample.check != "none", "prose has no right answer"
    if sample.check == "exact":
        return Judgement(valid=None, correct=text == sample.reference)
    if sample.check == "number":
        return Judgement(valid=None, correct=final_number(text) == final_number(sample.reference))
    if sample.check == "mention":
        return Judgement(valid=None, correct=_mentions_the_answer_only(sample, text))
    try:
        value = strict_json(text)
    except (ValueError, RecursionError):
        return Judgement(valid=False, correct=False)
    valid = sample.check == "json" or calls_declared_tool(value, sample.tools)
    return Judgement(valid=valid, correct=valid and _canonical(value) == _canonical(strict_json(sample.reference)))
