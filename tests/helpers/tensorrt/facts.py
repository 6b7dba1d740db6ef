"""Facts about the names that kvgate uses from TensorRT's Python bindings. A GPU and TensorRT's libraries are not needed."""

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]

Uses = dict[str, list[tuple[int, frozenset[str]]]]
"""Name, `Class.member` or `plugin.name` -> its calls, as (number of positional arguments, names of keyword arguments)."""

RECEIVERS = {
    "builder": "Builder",
    "network": "INetworkDefinition",
    "parser": "OnnxParser",
    "error": "ParserError",
    "profile": "IOptimizationProfile",
    "runtime": "Runtime",
    "engine": "ICudaEngine",
    "context": "IExecutionContext",
}
"""Variable or attribute name -> the TensorRT class of its object."""

SOURCES: dict[str, dict[str, str]] = {
    "stages/engines/tensorrt/library.py": {},
    "stages/engines/tensorrt/build.py": {"config": "IBuilderConfig"},
    "stages/engines/tensorrt/session.py": {"config": "IRuntimeConfig"},
    "stages/engines/tensorrt/engine.py": {"runtime": "Runtime", "engine": "", "plan": "ICudaEngine"},
    "plugins/kv_attention/tensorrt_plugin.py": {},
}
"""Files that call TensorRT -> names with another class than in RECEIVERS ("": not a TensorRT object)."""

OVERRIDDEN = ("ILogger.log",)
"""Methods of kvgate's classes that TensorRT calls."""


def uses() -> Uses:
    """Return all TensorRT names that kvgate uses, with their calls."""
    found: Uses = {}
    for file, names in SOURCES.items():
        classes = RECEIVERS | names
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        for name, call in _uses_of(tree, classes):
            found.setdefault(name, []).extend([] if call is None else [call])
    return found


def _uses_of(tree: ast.AST, classes: dict[str, str]) -> Iterator[tuple[str, tuple[int, frozenset[str]] | None]]:
    calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        parts = ast.unparse(node).split(".")
        if not all(part.isidentifier() for part in parts):
            continue
        receiver, member = parts[-2].removeprefix("_"), parts[-1]
        call = None
        if id(node) in calls:
            arguments = calls[id(node)]
            if not any(isinstance(argument, ast.Starred) for argument in arguments.args):
                call = len(arguments.args), frozenset(keyword.arg or "" for keyword in arguments.keywords)
        if receiver in ("trtp", "plugin") and member != "op":
            yield f"plugin.{member}", call
        elif len(parts) >= 3 and parts[-3] == "trt" and receiver[0].isupper():
            yield f"{receiver}.{member}", None
        elif receiver == "trt" and call is not None and member[0].isupper():
            yield f"{member}.__init__", call
        elif classes.get(receiver) and not member.startswith("_"):
            yield f"{classes[receiver]}.{member}", call


def facts(trt: Any, names: list[str]) -> dict[str, Any]:
    """Return the facts of all known `names`: an enumerator's number, "property", "class", or a function's signatures."""
    found = {}
    for name in names:
        owner, member = name.split(".")
        holder = getattr(trt, owner, None)
        value = None if holder is None else inspect.getattr_static(holder, member, None) or getattr(holder, member, None)
        if value is not None:
            found[name] = _fact(owner, member, value)
    return found


def _fact(owner: str, member: str, value: Any) -> Any:
    if isinstance(value, property):
        return "property"
    if member.isupper():
        return int(value)
    if inspect.isclass(value) and owner != "plugin":
        return "class"
    if inspect.isclass(value):
        member, value = "__init__", value.__init__
    documented = _signatures(member, value.__doc__ or "")
    parameters = inspect.signature(value).parameters.values() if not documented else ()
    return documented or [", ".join(_parameter(each) for each in parameters if each.name != "self")]


def _parameter(parameter: inspect.Parameter) -> str:
    return parameter.name + ("" if parameter.default is inspect.Parameter.empty else "=default")


def _signatures(member: str, documentation: str) -> list[str]:
    """Parse the signatures that pybind11 writes into a docstring; return their parameters, without self and types."""
    found = []
    for line in documentation.splitlines():
        written = re.match(rf"^(?:\d+\. )?{member}\((self: [^,)]+(?:, )?.*)\) -> ", line.strip())
        if written:
            without_values = re.sub(r"<[^>]*>", "value", written[1])
            parameters = re.findall(r"(\w+): [^,=\[]+(?:\[[^\]]*\])?\s*(=[^,]+)?", without_values)
            found.append(", ".join(name + ("=default" if value else "") for name, value in parameters if name != "self"))
    return found


def installed(library: str) -> tuple[str, dict[str, Any]]:
    """Return the installed release and its facts. Call it only once per process."""
    if library == "tensorrt":
        from helpers.tensorrt import stubs

        stubs.load()
    trt = importlib.import_module(library)
    return str(trt.__version__), facts(trt, sorted(named()))


def named() -> list[str]:
    """Return all TensorRT names that the code uses, including names from lookup tables."""
    from plugins.kv_attention.tensorrt_nodes import DATA_TYPES
    from stages.engines.tensorrt.build import CLEARED_FLAGS, NETWORK_FLAGS, SET_FLAGS
    from stages.engines.tensorrt.session import DTYPES

    tables = {
        "NetworkDefinitionCreationFlag": {name for names in NETWORK_FLAGS.values() for name in names},
        "BuilderFlag": {*CLEARED_FLAGS, *(name for names in SET_FLAGS.values() for name in names)},
        "DataType": {*DTYPES, *DATA_TYPES.values()},
    }
    return [*uses(), *OVERRIDDEN, *(f"{owner}.{member}" for owner, members in tables.items() for member in members)]
