"""Function calling from BFCL v4, the Berkeley Function Calling Leaderboard: its data, its prompt, its checker.

All three are read from the distribution bfcl-eval, which must be installed without the dozens of libraries that it declares:
they drive hosted models. Nothing of a data set and nothing that a model answers is executed. The package's own reader of calls,
`[f(x=1), g(y="a")]`, would run `eval` on the arithmetic in a model's text, which is code from the outside; the reader here
reads the same calls from the syntax tree: it computes `+ - * /` between written numbers and knows no other operator.

Source: https://github.com/ShishirPatil/gorilla/tree/main/berkeley-function-call-leaderboard (Apache-2.0)
"""

import ast
import json
import operator
import random
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from types import ModuleType, SimpleNamespace
from typing import Any

from pipeline.core.records import Sample
from pipeline.core.workloads import BfclConfig
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


Call = dict[str, dict[str, Any]]
"""One call: its function's name and, by name, its arguments."""

_ARITHMETIC: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def read_calls(text: str) -> list[Call]:
    """Return the calls that `text` makes.

    Backquotes around the text are dropped and missing brackets are added, as BFCL does. Positional arguments are dropped, too:
    its checker knows arguments by name only. A bare name is its text, a call without named arguments likewise.
    """
    text = text.strip("`\n ")
    text = text if text.startswith("[") else f"[{text}"
    text = text if text.endswith("]") else f"{text}]"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a model may write "\d"
            body = ast.parse(text, mode="eval").body
        if not isinstance(body, ast.List):
            raise ValueError("not a list of calls")
        return [_call(element) for element in body.elts]
    except (SyntaxError, TypeError, ArithmeticError, RecursionError, MemoryError) as error:
        raise ValueError(f"not a list of calls: {error}") from error


def _call(node: ast.expr) -> Call:
    if not isinstance(node, ast.Call):
        raise ValueError(f"{ast.unparse(node)} is not a call")
    parts: list[str] = []
    function = node.func
    while isinstance(function, ast.Attribute):
        parts.append(function.attr)
        function = function.value
    if isinstance(function, ast.Name):
        parts.append(function.id)
    return {".".join(reversed(parts)): {str(keyword.arg): _value(keyword.value) for keyword in node.keywords}}


def _value(node: ast.expr | None) -> Any:
    value: Any
    match node:
        case ast.Constant():
            value = "..." if node.value is Ellipsis else node.value
        case ast.UnaryOp(ast.USub(), ast.Constant()):
            negated: Any = _value(node.operand)
            value = -negated  # TypeError where it is no number
        case ast.BinOp():
            value = _arithmetic(node)
        case ast.List(elements):
            value = [_value(element) for element in elements]
        case ast.Tuple(elements):
            value = tuple(_value(element) for element in elements)
        case ast.Dict(keys, values):
            value = {_value(key): _value(item) for key, item in zip(keys, values, strict=True)}
        case ast.Name(name):
            value = name
        case ast.Call(keywords=[]):
            value = ast.unparse(node)
        case ast.Subscript(of, index):
            value = f"{ast.unparse(of)}[{ast.unparse(index)}]"
        case ast.Call():
            value = _call(node)
        case _:
            raise ValueError(f"{ast.unparse(node) if node else '**'} is no argument of a call")
    return value


def _arithmetic(node: ast.BinOp) -> float:
    left, right = _value(node.left), _value(node.right)
    if type(node.op) not in _ARITHMETIC or not {type(left), type(right)} <= {int, float}:
        raise ValueError(f"{ast.unparse(node)} is no arithmetic of numbers")
    return _ARITHMETIC[type(node.op)](left, right)


def write_calls(possible: list[dict[str, dict[str, list[Any]]]], required: dict[str, list[str]]) -> str:
    """Return the calls that a list of possible answers describes, with the first value that each argument may have."""
    calls = []
    for answer in possible:
        for name, arguments in answer.items():
            chosen = {key: _first(values) for key, values in arguments.items() if "" not in values or key in required[name]}
            calls.append(f"{name}({', '.join(f'{key}={value!r}' for key, value in chosen.items())})")
    return f"[{', '.join(calls)}]"


def _first(values: list[Any]) -> Any:
    """Return the first value that is not "".

    In a dictionary, or in a list of them, each value is again a list of what may stand there. Deeper ones are meant as written.
    """
    value = next((value for value in values if value != ""), "")
    if isinstance(value, list):
        return [_chosen(item) if isinstance(item, dict) else item for item in value]
    return _chosen(value) if isinstance(value, dict) else value


def _chosen(entries: dict[str, list[Any]]) -> dict[str, Any]:
    return {key: next(value for value in values if value != "") for key, values in entries.items() if "" not in values}
