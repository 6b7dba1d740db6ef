"""Loads the samples of an evaluation, generated or from the user's JSONL file, and divides them into rounds.

Every line of the file is checked; docs/questions.md#my-questions describes its keys. The gates may decide after any round, and
skip the others.
"""

import hashlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from stages.core.errors import UserError, short
from stages.core.records import LineCheck, Sample
from stages.core.strict import CONTROLS, read_user_file
from stages.evaluate.inputs.checks import judge, strict_json
from stages.evaluate.inputs.lengths import long_samples
from stages.verdict.verdict import ALL
from stages.workloads.config import LONG, Workload, WorkloadsConfig
from stages.workloads.conversation import Role
from stages.workloads.generated import generate
from stages.workloads.gsm8k import gsm8k_samples


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Message(_Strict):
    role: Role
    content: str


class _Tool(_Strict):
    name: str
    arguments: tuple[str, ...]


class _Line(_Strict):
    """A line of the user's file."""

    id: str | None = Field(default=None, pattern=rf"^[^{CONTROLS}]{{1,200}}$")
    workload: str = Field(default="custom", pattern=r"^[A-Za-z0-9_-]{1,64}$")
    prompt: str | None = Field(default=None, pattern=r"\S")
    messages: tuple[_Message, ...] | None = Field(default=None, min_length=1)
    reference: str = Field(pattern=r"\S")
    check: LineCheck = "exact"
    document: str = ""
    mentions: tuple[str, ...] = ()
    distractors: tuple[str, ...] = ()
    difficulty: Literal["", "easy", "medium", "hard"] = ""
    tools: tuple[_Tool, ...] = ()


_PATTERNS = {"id": "must be 1 to 200 characters that can be shown", "workload": "must be 1 to 64 letters, digits, _ and -"}
"""Key -> description of its pattern. The pattern of all other keys requires a text that is not empty."""


def load_samples(config: WorkloadsConfig) -> list[Sample]:
    """Return all samples of an evaluation: generated samples, long documents, GSM8K, then the user's JSONL file.

    The function loads no model and no tokenizer, so that a bad file is reported before anything expensive starts. Long
    documents are therefore not cut yet; `lengths.fit_lengths` does that. Raises UserError with a line `FILE:LINE: key: problem`
    per problem of the user's file; MissingRequirement if GSM8K is configured but not installed.
    """
    # Use the order of the Workload type, not of the configuration, because the workloads' digest depends on the order.
    counts = {name: config.samples.get(name, 0) for name in get_args(Workload)}
    samples = [s for name, count in counts.items() for s in generate(name, count, config.seed, "evaluation")]
    samples += long_samples(config)
    if config.gsm8k:
        samples += gsm8k_samples(config.gsm8k, config.seed)
    if config.jsonl is not None and config.user_path is not None:
        samples += read_jsonl(config.user_path, {sample.id for sample in samples})
    return samples


MAX_PROBLEMS = 20


def read_jsonl(path: Path, taken: set[str]) -> list[Sample]:
    """Read samples from a JSONL file. A line without an id gets one of the file's name and the line's number.

    Raises UserError with one line per problem, for example for an id in `taken`. A problem of several lines is reported once.
    """
    try:
        lines = read_user_file("workloads.jsonl", path).decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"workloads.jsonl={path}: is not UTF-8 ({error.reason}); give a text in UTF-8") from None
    samples: dict[int, Sample] = {}
    lines_by_problem: dict[str, tuple[str, list[int]]] = {}
    used_ids = set(taken)
    lines_by_question: dict[tuple[object, ...], int] = {}
    for number, text in enumerate(lines, start=1):
        if not text.strip():
            continue
        try:
            sample = _sample(text)
            if sample.id and sample.id in used_ids:
                raise UserError(f"id: {sample.id!r} was already used, give every sample its own")
            first = lines_by_question.setdefault((sample.prompt, sample.messages, sample.reference), number)
            if first != number:  # it would count as evidence twice
                raise UserError(f"line: repeats the question and the reference of an earlier line ({first}), leave it out")
        except UserError as error:
            for problem in str(error).split("\n"):
                kind = re.sub(r"\(.*\)", "", problem)  # without the value or the position, which differ between lines
                lines_by_problem.setdefault(kind, (problem, []))[1].append(number)
        else:
            used_ids.add(sample.id)
            samples[number] = sample
    if lines_by_problem:
        raise UserError("\n".join(_list_problems(path, list(lines_by_problem.values()))))
    if not samples:
        raise UserError(f"{path}:1: prompt: the file has no samples, give one JSON object a line")
    for number, sample in samples.items():
        if not sample.id:
            samples[number] = replace(sample, id=_free_id(f"{path.stem}-{number:04d}", used_ids))
            used_ids.add(samples[number].id)
    return list(samples.values())


def _list_problems(path: Path, problems: Sequence[tuple[str, Sequence[int]]]) -> list[str]:
    """Return a line per problem with its first line of the file, at most MAX_PROBLEMS of them."""
    listed = []
    for problem, (first, *others) in problems[:MAX_PROBLEMS]:
        more = f" (also in {len(others):,} more line{'s' if len(others) > 1 else ''})" if others else ""
        listed.append(f"{path}:{first}: {problem}{more}")
    unlisted = len(problems) - MAX_PROBLEMS
    return [*listed, f"{path}: {unlisted:,} more problems, correct these first"] if unlisted > 0 else listed


def _free_id(wanted: str, used: Collection[str]) -> str:
    while wanted in used:
        wanted += "_"
    return wanted


def _sample(text: str) -> Sample:
    try:
        value = strict_json(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"line: not one JSON value ({error}), write one JSON object on the line") from error
    try:
        line = _Line.model_validate_json(json.dumps(value))
    except ValidationError as error:
        raise UserError("\n".join(dict.fromkeys(_problems(error)))) from error
    values: dict[str, Any] = vars(line) | {"id": line.id or "", "prompt": line.prompt or ""}
    values["messages"] = tuple((message.role, message.content) for message in line.messages or ())
    values["tools"] = tuple((tool.name, tool.arguments) for tool in line.tools)
    sample = Sample(**values)
    problems = list(_contradictions(sample))
    if problems:
        raise UserError("\n".join(problems))
    return sample


_OTHER_NAMES = (
    dict.fromkeys(("question", "query", "input", "instruction"), "prompt")
    | dict.fromkeys(("conversations", "conversation"), "messages")
    | dict.fromkeys(("answer", "chosen", "completion", "expected", "ideal", "output", "response", "target"), "reference")
)
"""Key of other tools' files -> kvgate's key."""


def _problems(error: ValidationError) -> Iterator[str]:
    """Yield the problems of a line's keys, and of its first invalid message or tool: others often have the same problem."""
    problems = error.errors(include_url=False)
    keys = defaultdict[tuple[str, tuple[int | str, ...]], list[str]](list)  # kind of problem, object of the line -> its keys
    for problem in problems:
        keys[problem["type"], problem["loc"][:-1]] += [str(key) or '""' for key in problem["loc"][-1:]]
    first = next((problem["loc"][:-1] for problem in problems if problem["loc"][1:]), ())
    for problem in problems:
        key, kind, text = ".".join(map(str, problem["loc"])), problem["type"], problem["msg"]
        item = problem["loc"][:-1]  # a message or a tool; empty for a key of the line
        unknown, missing = (keys[of, item] for of in ("extra_forbidden", "missing"))
        if (kind == "too_short" and problem["input"]) or item not in ((), first):
            continue
        if kind == "missing" and unknown:
            continue  # the key is probably there, under an unknown name
        if kind == "extra_forbidden":
            yield _unknown(".".join(map(str, item)), unknown, missing)
        elif kind == "missing":
            yield f"{key}: missing, add it{' (the right answer, not as a message)' if key == 'reference' else ''}"
        else:
            if kind in ("tuple_type", "list_type"):
                text = "must be a list of objects" if key in ("messages", "tools") else 'must be a list, as in ["TEXT"]'
            if kind in ("string_pattern_mismatch", "too_short"):
                text = _PATTERNS.get(key, "must not be empty")
            fix = "" if key else ", correct the line"
            value = short(json.dumps(problem["input"], ensure_ascii=False))
            yield f"{key or 'line'}: {text[0].lower()}{text[1:]} (got {value}){fix}"


def _unknown(item: str, unknown: Sequence[str], missing: Sequence[str]) -> str:
    """Return the problem of all unknown keys of a line, or of a message or tool in it (`item`)."""
    names = ", ".join(unknown)
    if item:
        fix = f"write {', '.join(missing)} instead" if missing else f"leave {'them' if unknown[1:] else 'it'} out"
        return f"{item}: has {names}, {fix}"
    close = {key: get_close_matches(key, _Line.model_fields, 1, 0.75) for key in unknown}
    meant = {key: _OTHER_NAMES.get(key) or "".join(close[key]) for key in unknown}
    uses = [f"use {name} for {key}" for key, name in meant.items() if name]
    others = ", ".join(key for key in unknown if not meant[key])
    leaves = [f"move or leave out {others} (the keys are {', '.join(_Line.model_fields)})"] if others else []
    return f"{names}: unknown key{'s' if unknown[1:] else ''}, {' and '.join([*uses, *leaves])}"


_RIGHT = {
    "json": "give strict JSON",
    "tool_call": 'give {"name": ..., "arguments": {...}} of one of the tools, with exactly its arguments',
    "mention": "give only words of the reference as mentions (default: the whole reference), and no such word as a distractor",
}
"""Check -> fix for a reference that the check itself judges wrong."""


def _contradictions(sample: Sample) -> Iterator[str]:
    """Yield the problems that involve more than one key, or reserved names."""
    if sample.workload == ALL or sample.workload.startswith(LONG):
        yield f"workload: {ALL} and names that begin with {LONG} are reserved, give another"
    if bool(sample.prompt) == bool(sample.messages):
        state = "given together with" if sample.prompt else "missing, and so is"
        yield f"prompt: {state} messages, give exactly one of the two"
    if sample.messages and not sample.messages[-1][1].strip():
        yield "messages: the last one is empty, write the question into it"
    if sample.messages and sample.messages[-1][0] != "user":
        yield f'messages: end with a message of "{sample.messages[-1][0]}", end them with the question as a message of "user"'
    for key, check in (("tools", "tool_call"), ("mentions", "mention"), ("distractors", "mention")):
        if getattr(sample, key) and sample.check != check:
            yield f'{key}: check "{sample.check}" does not read them, leave them out or use check "{check}"'
    if sample.check in _RIGHT and not judge(sample, sample.reference):
        yield f'reference: check "{sample.check}" would judge it wrong, {_RIGHT[sample.check]}'


FIRST_ROUND = 15
"""Minimum judged samples per workload in the first round. Fewer samples do not show whether the baseline can answer, and a
PASS needs 15 documents anyway, the default of `gates.min_samples`."""


def assign_rounds(samples: Sequence[Sample], shares: Sequence[float]) -> list[list[Sample]]:
    """Divide samples into rounds of similar composition. `shares`: cumulative share of the samples, by round, ascending to 1.

    Every workload and difficulty is divided in proportion to the shares, as closely as possible without splitting a document.
    The order of the samples affects only their order within a round: a file sorted by difficulty gives the same rounds. The
    first round has FIRST_ROUND judged samples of every workload, or all of a smaller workload. Empty rounds are left out.
    """
    documents: dict[str, Counter[tuple[str, str]]] = {}
    for sample in samples:
        documents.setdefault(sample.cluster, Counter())[sample.workload, sample.difficulty] += 1
    totals = sum(documents.values(), Counter[tuple[str, str]]())
    widths = [share - before for before, share in zip([0.0, *shares], shares, strict=False)]
    missing = [{stratum: width * count for stratum, count in totals.items()} for width in widths]
    rounds: dict[str, int] = {}
    # Assign large documents first, so that small documents even out the rounds. The digest shuffles documents of equal size.
    order = sorted(documents, key=lambda name: (-documents[name].total(), hashlib.sha256(name.encode()).hexdigest()))
    for name in order:
        document = documents[name]

        def lacking(number: int, document: Counter[tuple[str, str]] = document) -> float:
            return sum(count * missing[number][stratum] / totals[stratum] for stratum, count in document.items())

        chosen = max(range(len(shares)), key=lambda number: (lacking(number), -number))
        rounds[name] = chosen
        for stratum, count in document.items():
            missing[chosen][stratum] -= count
    judged: dict[str, list[int]] = {}
    for sample in samples:
        if sample.judged:
            judged.setdefault(sample.workload, []).append(rounds[sample.cluster])
    first = next(number for number in range(len(shares)) if _suffices(number, judged))
    numbers = [max(first, rounds[sample.cluster]) for sample in samples]
    placed = list(zip(samples, numbers, strict=True))
    return [[sample for sample, place in placed if place == number] for number in sorted(set(numbers))]


def _suffices(number: int, judged: Mapping[str, Sequence[int]]) -> bool:
    """Return whether the rounds up to `number` have FIRST_ROUND judged samples of every workload, or all its samples."""
    return all(sum(place <= number for place in places) >= min(FIRST_ROUND, len(places)) for places in judged.values())
