"""Function calling from BFCL v4, the Berkeley Function Calling Leaderboard: its data, its prompt, its checker.

All three are read from the distribution bfcl-eval, which must be installed without the dozens of libraries that it declares:
they drive hosted models. Nothing of a data set and nothing that a model answers is executed.

Source: https://github.com/ShishirPatil/gorilla/tree/main/berkeley-function-call-leaderboard (Apache-2.0)
"""

import json
import random
import sys
from collections import defaultdict
from functools import cache
from importlib.resources import files
from types import ModuleType, SimpleNamespace
from typing import Any

from pipeline.core.records import Sample
from pipeline.core.workloads import BfclConfig
from stages.workloads.calls import read_calls, write_calls
from stages.workloads.packaged import packaged

VERSION = "2026.3.23"

NO_CALL = "None of the functions can be used."
"""The reference of categories where no call is right: BFCL has none, and its prompt asks to point that out."""

_PYTHON_HINT = " Note that the provided function is in Python 3 syntax."
"""Ends every function's description, as bfcl_eval.utils appends it. Importing that module creates directories."""


def bfcl_samples(config: BfclConfig, seed: int) -> list[Sample]:
    """Return the samples of the configured categories, each category a workload of its own: bfcl_simple_python.

    Entries are drawn with the seed, and stand in the order of BFCL's files. Entries whose possible answer, written as a call,
    the checker itself refuses are left out: nothing could be forced there that counts as right.
    """
    packaged("bfcl-eval", VERSION, "workloads.bfcl")
    samples = []
    for category in config.categories:
        known = _category(category)
        drawn = random.Random(f"bfcl:{category}:{seed}").sample(range(len(known)), min(config.samples, len(known)))
        samples += [known[i] for i in sorted(drawn)]
    return samples


def correct_calls(sample: Sample, text: str) -> bool:
    """Return whether BFCL's checker accepts an answer: the right calls, or none where none is right."""
    expected = json.loads(sample.expected)
    try:
        calls = read_calls(text)
    except ValueError:
        return expected["possible"] is None
    if expected["possible"] is None:
        return not calls
    try:
        verdict = _checker()(
            expected["functions"], calls, expected["possible"], _python_language(), expected["category"], "kvgate"
        )
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        # The checker looks into nested values before it knows their types. What it stumbles over, it has not accepted.
        return False
    return bool(verdict["valid"])


def _lines(*path: str) -> list[dict[str, Any]]:
    text = files("bfcl_eval").joinpath("data", *path).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.split("\n") if line.strip()]


@cache
def _category(category: str) -> tuple[Sample, ...]:
    """Return every entry of a category as a sample whose reference the checker accepts."""
    name = f"BFCL_v4_{category}.json"
    entries = _lines(name)
    # Where no call is right, there is no file of possible answers.
    callable_ = "irrelevance" not in category
    answers = {line["id"]: line["ground_truth"] for line in _lines("possible_answer", name)} if callable_ else {}
    samples = (_sample(category, entry, answers.get(entry["id"])) for entry in entries)
    return tuple(sample for sample in samples if correct_calls(sample, sample.reference))


def _sample(category: str, entry: dict[str, Any], possible: list[Any] | None) -> Sample:
    functions = entry["function"]
    required: defaultdict[str, list[str]] = defaultdict(list)
    required |= {function["name"]: function["parameters"]["required"] for function in functions}
    return Sample(
        id=f"bfcl_{entry['id']}",
        workload=f"bfcl_{category}",
        reference=NO_CALL if possible is None else write_calls(possible, required),
        messages=_messages(entry["question"][0], functions),
        check="bfcl",
        expected=json.dumps({"category": category, "functions": functions, "possible": possible}),
    )


def _messages(question: list[dict[str, str]], functions: list[dict[str, Any]]) -> tuple[tuple[str, str], ...]:
    """Return the conversation with BFCL's default system prompt, in front of the question's own if it has one."""
    from bfcl_eval.constants import default_prompts as prompts

    documented = [{**function, "description": function["description"] + _PYTHON_HINT} for function in functions]
    parts = prompts.PROMPT_STYLE_TEMPLATES["classic"]
    system = prompts.PROMPT_TEMPLATE_MAPPING["plaintext"].format(
        persona=parts["persona"],
        task=parts["task"],
        tool_call_format=parts["tool_call_no_tag"].format(
            output_format=prompts.OUTPUT_FORMAT_MAPPING["python"], param_types=prompts.PARAM_TYPE_MAPPING["python"]
        ),
        multiturn_behavior=parts["multiturn_behavior"],
        available_tools=parts["available_tools"].format(format="json", functions=json.dumps(documented, indent=4)),
    )
    turns = [(message["role"], message["content"]) for message in question]
    if turns[0][0] == "system":
        return (("system", f"{system}\n\n{turns[0][1]}"), *turns[1:])
    return (("system", system), *turns)


@cache
def _checker() -> Any:
    """Import BFCL's `ast_checker`, with a stand-in for the table of its models, which imports every vendor's SDK.

    The checker asks that table whether a model's functions are renamed from `a.b` to `a_b`. Those of prompted models are not.
    """
    table = "bfcl_eval.constants.model_config"
    stand_in: Any = ModuleType(table)
    stand_in.MODEL_CONFIG_MAPPING = defaultdict(lambda: SimpleNamespace(underscore_to_dot=False))
    present = sys.modules.get(table)
    sys.modules[table] = stand_in
    try:
        from bfcl_eval.eval_checker.ast_eval.ast_checker import ast_checker
    finally:
        del sys.modules[table]
        if present is not None:
            sys.modules[table] = present
    return ast_checker


def _python_language() -> Any:
    from bfcl_eval.constants.enums import Language

    return Language.PYTHON
