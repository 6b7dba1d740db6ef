"""All TensorRT names that kvgate uses are in the facts recorded from the bindings of every accepted release."""

import ast
import inspect
import json
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest
import tensorrt_facts
from tensorrt_facts import FACTS, OVERRIDDEN, ROOT

from stages.engines.bundle import release_of
from stages.engines.onnx.native.compiler import find_compiler
from stages.engines.tensorrt.library import RANGES, Name

RECORDED: dict[Name, dict[str, dict[str, Any]]] = json.loads(FACTS.read_text(encoding="utf-8"))
RELEASES = [(library, version) for library, versions in RECORDED.items() for version in versions]
USES = tensorrt_facts.uses()

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
    names = set(tensorrt_facts.named())
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


@pytest.mark.parametrize(("library", "version"), RELEASES)
def test_every_release_is_accepted_and_has_what_the_code_uses(library: Name, version: str) -> None:
    oldest, before = RANGES[library]
    assert oldest <= release_of(version) < before
    assert wanted(library) - RECORDED[library][version].keys() == set()
    assert library == "tensorrt_rtx" or RTX_ONLY.isdisjoint(RECORDED[library][version])


@pytest.mark.parametrize(("library", "version"), RELEASES)
def test_every_call_fits_a_signature_of_every_release(library: Name, version: str) -> None:
    recorded, checked = RECORDED[library][version], 0
    for name in wanted(library) & USES.keys():
        for positional, named in USES[name]:
            assert any(binds(each, positional, named) for each in signatures(recorded[name])), (name, positional, named)
            checked += 1
    assert checked > 30


def test_a_call_with_another_argument_would_not_fit() -> None:
    recorded = RECORDED["tensorrt"]["11.4.0.106"]
    assert not any(binds(each, 1, frozenset()) for each in signatures(recorded["IExecutionContext.set_device_memory"]))


@pytest.mark.parametrize(("library", "version"), RELEASES)
def test_methods_that_tensorrt_calls_take_what_it_passes(library: Name, version: str) -> None:
    written: dict[str, str] = {}
    for file in ("build", "library"):
        for node in ast.walk(ast.parse((ROOT / f"stages/engines/tensorrt/{file}.py").read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.args.args and node.args.args[0].arg == "self":
                written.setdefault(node.name, ", ".join(each.arg for each in node.args.args[1:]))
    for name in OVERRIDDEN:
        assert RECORDED[library][version][name] == [written[name.split(".")[1]]]


@pytest.mark.parametrize("library", RECORDED)
def test_the_facts_are_those_of_the_installed_bindings(library: Name) -> None:
    if find_compiler() is None:
        pytest.skip("no C compiler, or no AVX2")
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        version, found = pool.submit(tensorrt_facts.installed, library).result(timeout=120)
    if library == "tensorrt":
        assert version == os.environ.get("REQUIRE_TENSORRT", version), "not the release that was to be tested"
    assert found == RECORDED[library][version]
