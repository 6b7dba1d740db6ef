"""Backends and libraries that are loaded by name, and errors of a library in another interpreter, as they reach the user."""

import sys
from importlib import import_module
from pathlib import Path

import pytest

from pipeline.config import CONF
from pipeline.config.compose import plan
from stages.core.errors import MissingRequirement, UserError, exit_code, required_libraries
from stages.engines.backend import open_backend
from stages.engines.config import backend_configs
from stages.engines.interpreter.backend import InterpreterBackend
from stages.engines.interpreter.process import MAX_ERROR_CHARACTERS, Program, Worker, WorkerError, inspect_interpreter
from stages.engines.interpreter.protocol import EmptyAnswer


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
    builder = import_module(backend.build_module)
    if isinstance(backend, InterpreterBackend):
        assert callable(import_module(f"stages.engines.{backend.config.folder}.engine").load_engine)
    else:
        assert callable(builder.build_bundle)
    assert (CONF / "backend" / f"{name}.yaml").is_file()


def test_a_long_error_of_a_library_is_cut_to_a_line(tmp_path: Path) -> None:
    answer = "{'error': 'ValueError: one\\n\\ttwo ' + 'x' * 1_000_000}"
    (tmp_path / "worker.py").write_text(f"import json\nwhile input():\n    print(json.dumps({answer}))\n")
    program = Program("vllm", "vLLM", tmp_path / "worker.py", "pip install vllm")
    with Worker(program, sys.executable) as worker:
        for _ in range(2):
            with pytest.raises(WorkerError) as caught:
                worker.call("open", EmptyAnswer, 60)
            assert len(str(caught.value)) == MAX_ERROR_CHARACTERS
            assert str(caught.value).startswith("ValueError: one two xxx")
            assert str(caught.value).endswith("xxx...")
    with pytest.raises(MissingRequirement) as refused:
        inspect_interpreter(program, sys.executable)
    assert len(str(refused.value)) < 2 * MAX_ERROR_CHARACTERS


@pytest.mark.parametrize(
    ("printed", "message"),
    [(("ValueError: no such cache", "a child has failed"), "ValueError: no such cache"), (("loading", "bye"), "bye")],
)
def test_a_dead_worker_is_reported_with_its_last_exception(printed: tuple[str, ...], message: str, tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(f"import sys\nsys.stderr.write({chr(10).join(printed)!r})\nsys.exit(input() and 3)\n")
    with (
        Worker(Program("vllm", "vLLM", script, "pip install vllm"), sys.executable) as worker,
        pytest.raises(UserError, match=rf"vLLM ended with exit code 3 in open; .*; its last output: {message}$"),
    ):
        worker.call("open", EmptyAnswer, 60)
