"""The installed bindings of TensorRT have all names that kvgate uses, and take its calls.

`make test` reads two bindings, `make test-tensorrt-bindings` those of more releases.
"""

import ast
import inspect
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest
from helpers.tensorrt import facts
from helpers.tensorrt.facts import OVERRIDDEN, ROOT

from stages.engines.bundle import release_of
from stages.engines.onnx.native.compiler import find_compiler
from stages.engines.tensorrt.library import RANGES, Name

USES = facts.uses()

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
    names = set(facts.named())
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
        version, found = pool.submit(facts.installed, request.param).result(timeout=120)
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
