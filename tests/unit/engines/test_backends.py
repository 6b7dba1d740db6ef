"""Backends and libraries that are loaded by name: each backend has its modules, and a missing library is named."""

import sys
from importlib import import_module

import pytest

from pipeline.config import CONF
from pipeline.config.compose import plan
from stages.core.errors import MissingRequirement, exit_code, required_libraries
from stages.engines.backend import open_backend
from stages.engines.config import backend_configs
from stages.engines.interpreter.backend import InterpreterBackend


def test_a_library_that_is_not_installed_is_named_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "stages.checkpoints.gguf.convert", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    fix = "^torch is not installed here: pip install torch$"
    with pytest.raises(MissingRequirement, match=fix) as caught, required_libraries():
        import_module("stages.checkpoints.gguf.convert")
    assert exit_code(caught.value) == 4


def test_a_missing_module_of_kvgate_is_a_defect() -> None:
    with pytest.raises(ModuleNotFoundError), required_libraries():
        import_module("stages.nothing")


BACKEND_NAMES = sorted(backend_configs())


@pytest.mark.parametrize("name", BACKEND_NAMES)
def test_every_configured_backend_builds_and_loads(name: str) -> None:
    backend = open_backend(plan([f"backend={name}"], multirun=False).jobs[0].backend)
    builder = import_module(backend.build_module)  # the module's code is part of a bundle's key
    assert isinstance(backend, InterpreterBackend) or callable(builder.build_bundle)
    assert callable(import_module(backend.engine_module).load_engine)
    assert (CONF / "backend" / f"{name}.yaml").is_file()
