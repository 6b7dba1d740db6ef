"""Python-style function calls as BFCL asks for them, `[f(x=1), g(y="a")]`: read from a model's text, and written.

The package's own reader runs `eval` on the arithmetic in a model's text, which is code from the outside. This one reads the
same calls from the syntax tree and runs nothing: it computes `+ - * /` between written numbers and knows no other operator.
"""

import ast
import operator
import warnings
from collections.abc import Callable
from typing import Any

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
