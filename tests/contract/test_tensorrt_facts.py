"""The installed bindings of TensorRT have all names that kvgate uses, and take its calls.

`make test` reads two bindings, `make test-tensorrt-bindings` those of more releases.
"""

import ast
import importlib
import inspect
import os
import re
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from helpers.tensorrt import stubs

from stages.engines.bundle import release_of
from stages.engines.onnx.native.compiler import find_compiler
from stages.engines.tensorrt.library import RANGES, Name

ROOT = Path(__file__).resolve().parents[2]

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


def read_installed(library: str) -> tuple[str, dict[str, Any]]:
    """Return the installed release and its facts. Call it only once per process."""
    if library == "tensorrt":
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


USES = uses()

RTX_ONLY = {
    "BuilderFlag.REQUIRE_USER_ALLOCATION",
    "DynamicShapesKernelSpecializationStrategy.EAGER",
    "IBuilderConfig.num_compute_capabilities",
    "IBuilderConfig.set_compute_capability",
    "IExecutionContext.is_stream_capturable",
    "IRuntimeConfig.create_runtime_cache",
    "IRuntimeConfig.dynamic_shapes_kernel_specialization_strategy",
    "IRuntimeConfig.set_runtime_cache",
}
"""Names that are used only with TensorRT for RTX."""
PLUGINS_ONLY = {"NetworkDefinitionCreationFlag.PREFER_AOT_PYTHON_PLUGINS"}
"""Names that are used only with TensorRT, in addition to the package tensorrt.plugin."""


def wanted(library: Name) -> set[str]:
    names = set(named())
    if library == "tensorrt":
        return names - RTX_ONLY
    return {name for name in names - PLUGINS_ONLY if not name.startswith("plugin.")}


def signatures(written: list[str]) -> Iterator[inspect.Signature]:
    """Parse recorded parameters such as `network, config, flags=default` into signatures."""
    for parameters in written:
        function = ast.parse(f"def f({parameters}): ...").body[0]
        assert isinstance(function, ast.FunctionDef)
        optional = len(function.args.args) - len(function.args.defaults)
        yield inspect.Signature([
            inspect.Parameter(
                each.arg,
                inspect.Parameter.POSITIONAL_OR_KEYWORD,
                default=inspect.Parameter.empty if place < optional else None,
            )
            for place, each in enumerate(function.args.args)
        ])  # fmt: skip


def binds(signature: inspect.Signature, positional: int, named: frozenset[str]) -> bool:
    try:
        signature.bind(*range(positional), **dict.fromkeys(named))
    except TypeError:
        return False
    return True


@pytest.fixture(scope="module", params=RANGES)
def installed(request: pytest.FixtureRequest) -> tuple[Name, str, dict[str, Any]]:
    """A library, its release and the facts of its bindings, read in a separate process."""
    if find_compiler() is None:
        pytest.skip("no C compiler, or no AVX2")
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        version, found = pool.submit(read_installed, request.param).result(timeout=120)
    if request.param == "tensorrt":
        assert version == os.environ.get("REQUIRE_TENSORRT", version), "not the release that was to be tested"
    return request.param, version, found


def test_the_release_is_accepted_and_has_every_used_name(installed: tuple[Name, str, dict[str, Any]]) -> None:
    library, version, found = installed
    oldest, before = RANGES[library]
    assert oldest <= release_of(version) < before
    assert wanted(library) - found.keys() == set()
    assert library == "tensorrt_rtx" or RTX_ONLY.isdisjoint(found)


def test_every_call_fits_a_signature(installed: tuple[Name, str, dict[str, Any]]) -> None:
    library, _, found = installed
    checked = 0
    for name in wanted(library) & USES.keys():
        for positional, named in USES[name]:
            assert any(binds(each, positional, named) for each in signatures(found[name])), (name, positional, named)
            checked += 1
    assert checked > 30


def test_methods_that_tensorrt_calls_accept_its_arguments(installed: tuple[Name, str, dict[str, Any]]) -> None:
    written: dict[str, str] = {}
    for file in ("build", "library"):
        for node in ast.walk(ast.parse((ROOT / f"stages/engines/tensorrt/{file}.py").read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.args.args and node.args.args[0].arg == "self":
                written.setdefault(node.name, ", ".join(each.arg for each in node.args.args[1:]))
    for name in OVERRIDDEN:
        assert installed[2][name] == [written[name.split(".")[1]]]
