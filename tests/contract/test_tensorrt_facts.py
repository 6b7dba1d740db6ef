"""The installed bindings of TensorRT have all names that kvgate uses, and take its calls.

`make test` reads two bindings, `make test-tensorrt-bindings` those of more releases.
"""

import ast
import importlib
import inspect
import os
import re
from collections.abc import Iterable, Iterator
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

Signatures = dict[str, list[inspect.Signature]]
"""Name -> its signatures; empty if it is not a function."""
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

OVERRIDDEN = "ILogger.log"
"""TensorRT's method that a class of kvgate overrides."""


def uses() -> Uses:
    """Return all TensorRT names that kvgate uses, with their calls."""
    used: Uses = {}
    for file, names in SOURCES.items():
        classes = RECEIVERS | names
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        for name, call in _uses_of(tree, classes):
            used.setdefault(name, []).extend([] if call is None else [call])
    return used


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


def read_installed(library: str, names: Iterable[str]) -> tuple[str, Signatures]:
    """Return the installed release, and the signatures of the names that it has. Call it only once per process."""
    if library == "tensorrt":
        stubs.load()
    trt = importlib.import_module(library)
    signatures = {}
    for name in names:
        owner, member = name.split(".")
        value = getattr(getattr(trt, owner, None), member, None)
        if value is not None:
            if owner == "plugin" and inspect.isclass(value):
                member, value = "__init__", value.__init__
            signatures[name] = list(_signatures(member, value))
    return str(trt.__version__), signatures


def _signatures(member: str, value: Any) -> Iterator[inspect.Signature]:
    """Yield the signatures of a function without self and types; pybind11 writes them into the docstring."""
    if inspect.isfunction(value):
        parameters = list(inspect.signature(value).parameters.values())
        yield _signature((parameter.name, parameter.default is not inspect.Parameter.empty) for parameter in parameters)
    for line in (value.__doc__ or "").splitlines():
        if match := re.match(rf"^(?:\d+\. )?{member}\((self: [^,)]+(?:, )?.*)\) -> ", line.strip()):
            without_values = re.sub(r"<[^>]*>", "value", match[1])
            yield _signature(re.findall(r"(\w+): [^,=\[]+(?:\[[^\]]*\])?\s*(=[^,]+)?", without_values))


def _signature(parameters: Iterable[tuple[str, object]]) -> inspect.Signature:
    """Return a signature from pairs of a parameter's name and whether it is optional."""
    kind, empty = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty
    return inspect.Signature([
        inspect.Parameter(name, kind, default=None if optional else empty) for name, optional in parameters if name != "self"
    ])  # fmt: skip


def used_names() -> list[str]:
    """Return all TensorRT names that the code uses, including names from lookup tables."""
    from plugins.kv_attention.tensorrt_nodes import DATA_TYPES
    from stages.engines.tensorrt.build import CLEARED_FLAGS, NETWORK_FLAGS, SET_FLAGS
    from stages.engines.tensorrt.session import DTYPES

    tables = {
        "NetworkDefinitionCreationFlag": {name for names in NETWORK_FLAGS.values() for name in names},
        "BuilderFlag": {*CLEARED_FLAGS, *(name for names in SET_FLAGS.values() for name in names)},
        "DataType": {*DTYPES, *DATA_TYPES.values()},
    }
    return [*uses(), OVERRIDDEN, *(f"{owner}.{member}" for owner, members in tables.items() for member in members)]


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


def required_names(library: Name) -> set[str]:
    names = set(used_names())
    if library == "tensorrt":
        return names - RTX_ONLY
    return {name for name in names - PLUGINS_ONLY if not name.startswith("plugin.")}


def binds(signature: inspect.Signature, positional: int, named: frozenset[str]) -> bool:
    try:
        signature.bind(*range(positional), **dict.fromkeys(named))
    except TypeError:
        return False
    return True


@pytest.mark.parametrize("library", RANGES)
def test_the_release_has_every_name_and_accepts_every_call(library: Name) -> None:
    if find_compiler() is None:
        pytest.skip("no C compiler, or no AVX2")
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        version, signatures = pool.submit(read_installed, library, used_names()).result(timeout=120)
    if library == "tensorrt":
        assert version == os.environ.get("REQUIRE_TENSORRT", version), "the installed release is not REQUIRE_TENSORRT"
        assert RTX_ONLY.isdisjoint(signatures)
    oldest, before = RANGES[library]
    assert oldest <= release_of(version) < before
    assert required_names(library) - signatures.keys() == set()
    calls = [(name, *call) for name in required_names(library) & USES.keys() for call in USES[name]]
    assert len(calls) > 30
    for name, positional, keywords in calls:
        assert any(binds(signature, positional, keywords) for signature in signatures[name]), (name, positional, keywords)
    (log,) = (
        node
        for node in ast.walk(ast.parse((ROOT / "stages/engines/tensorrt/library.py").read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name == "log"
    )
    assert [list(signature.parameters) for signature in signatures[OVERRIDDEN]] == [
        [argument.arg for argument in log.args.args[1:]]
    ]
