"""Judges generated answers. All checks except "mention" and "number" compare the whole text, never a substring.

"mention" is for models that phrase answers freely: "The code is 4711." mentions the reference "4711". It compares words, see
`words_of`.
"""

import json
import re
import unicodedata
from decimal import Decimal
from typing import Any

from stages.core.records import Sample
from stages.core.strict import refuse_constant, unique_keys
from stages.workloads.gsm8k import final_number


def strict_json(text: str) -> Any:
    """Parse a text that is exactly one JSON value without duplicate keys, NaN or Infinity. Raises ValueError."""
    return json.loads(text, object_pairs_hook=unique_keys, parse_constant=refuse_constant)


def _number(text: str) -> tuple[str, Decimal]:
    return "number", Decimal(text)


def _value(text: str) -> Any:
    """Parse strict JSON so that equal values compare equal: 12, 12.0 and 1.2e1 are equal, while 1, true and "1" differ."""
    return json.loads(text, parse_int=_number, parse_float=_number)


def _word_pattern() -> re.Pattern[str]:
    """Return the pattern of a word. Python's \\w has no combining marks, which are vowels and tones in Hindi or Thai."""
    marks = "".join(mark for mark in map(chr, range(0x300, 0x20000)) if unicodedata.category(mark) in ("Mn", "Mc"))
    part = rf"\w[\w{marks}]*"
    return re.compile(rf"(?:(?<![\w{marks}])-(?=\d))?{part}(?:[.,:/@-]{part})*")


_WORD = _word_pattern()
_EQUAL = str.maketrans({"\N{MINUS SIGN}": "-", "\N{HYPHEN}": "-"} | {chr(code): None for code in range(0xFE00, 0xFE10)})
"""Replacements for characters that NFKC keeps. Other minus signs and hyphens become "-". Variation selectors, which only choose
how a character is drawn, are dropped."""


def words_of(text: str) -> tuple[str, ...]:
    """Return the words that check "mention" compares, case-folded and in Unicode's compatibility form (NFKC).

    A word is a run of letters with their combining marks, digits and _. It may have single `. , : / @ -` inside, and the minus
    sign of a number in front. Therefore 93.10 mentions neither 93 nor 10, and -5 does not mention 5. Other punctuation and
    white space separate words; a text in a script without spaces (Thai, Chinese) is one word.
    """
    return tuple(_WORD.findall(unicodedata.normalize("NFKC", text).casefold().translate(_EQUAL)))


def mentions(text: tuple[str, ...], phrase: tuple[str, ...]) -> bool:
    """Return whether `text` contains the words of `phrase` consecutively."""
    return any(text[i : i + len(phrase)] == phrase for i in range(len(text) - len(phrase) + 1))


def _mentions_the_answer_only(sample: Sample, text: str) -> bool:
    words = words_of(text)
    # A phrase without words cannot be mentioned, and a distractor without words makes every answer wrong.
    phrases = [words_of(phrase) for phrase in sample.mentions or (sample.reference,)]
    distracted = any(mentions(words, words_of(distractor)) for distractor in sample.distractors)
    return not distracted and all(phrase and mentions(words, phrase) for phrase in phrases)


def calls_declared_tool(call: Any, tools: tuple[tuple[str, tuple[str, ...]], ...]) -> bool:
    """Return whether `call` is {"name", "arguments"} of a declared tool with exactly that tool's arguments."""
    if not isinstance(call, dict) or set(call) != {"name", "arguments"} or not isinstance(call["arguments"], dict):
        return False
    return any(call["name"] == name and set(call["arguments"]) == set(arguments) for name, arguments in tools)


def judge(sample: Sample, text: str) -> bool:
    """Return whether a generated text is right.

    "exact": whether `text`, without the stop token, equals the reference. "mention": whether it mentions all `sample.mentions`
    (the reference if there are none) and no `sample.distractors`. "json" and "tool_call": whether it is strict JSON whose value
    equals the reference's, and calls a declared tool. "number": whether both final numbers are equal.
    """
    assert sample.judged, "prose has no right answer"
    if sample.check == "exact":
        return text == sample.reference
    if sample.check == "number":
        return final_number(text) == final_number(sample.reference)
    if sample.check == "mention":
        return _mentions_the_answer_only(sample, text)
    try:
        call = strict_json(text)
        well_formed = sample.check == "json" or calls_declared_tool(call, sample.tools)
        return well_formed and bool(_value(text) == _value(sample.reference))
    # No JSON, nested too deeply to compare, or an exponent beyond Decimal's range.
    except (ValueError, RecursionError, ArithmeticError):
        return False
