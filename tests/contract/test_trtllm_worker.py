"""The worker process in TensorRT-LLM's interpreter dies, hangs, prints noise, is interrupted or orphaned, and always ends."""

import importlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

import pytest
from helpers.commands.processes import await_none_with, processes_with
from helpers.engines.interpreter_bundles import make_bundle, open_engine
from helpers.engines.interpreters import make_interpreter, script
from helpers.engines.trtllm_exports import make_exports

from stages.core.errors import MissingRequirement, UserError
from stages.engines.interpreter import process
from stages.engines.interpreter.process import CHANNEL, Worker, inspect_interpreter
from stages.engines.interpreter.protocol import Description
from stages.engines.trtllm.backend import PROGRAM

ROOT = Path(__file__).resolve().parents[2]
TOKENS = [1, 2, 3, 4]


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path) -> Path:
    return make_exports(tiny_checkpoint, tmp_path_factory.mktemp("trtllm") / "quantized", "fp8")


@pytest.fixture(scope="module")
def bundle(quantized: Path) -> Path:
    return make_bundle("trtllm", quantized, quantized.parent / "bundle", "fp8", make_interpreter(quantized.parent / "bin"))


@pytest.mark.parametrize(
    ("says", "expected"),
    [
        *((says, "answered describe with b'") for says in ("Welcome to the login node!", "[]", '{"error": 1}')),
        ('{"ok": {"release": "1.2.1"}}', r"its worker does not match this kvgate: it answered describe with b'\{"),
    ],
)
def test_an_invalid_answer_is_reported_with_its_cause(tmp_path: Path, says: str, expected: str) -> None:
    with pytest.raises(UserError, match=expected) as raised:
        inspect_interpreter(PROGRAM, make_interpreter(tmp_path / "bin", says=says))
    assert "\n" not in str(raised.value)
    await_none_with(tmp_path / "bin")


def test_a_worker_that_is_closed_ends_by_itself(tmp_path: Path) -> None:
    with Worker(PROGRAM, make_interpreter(tmp_path / "bin")) as worker:
        assert worker.call("describe", Description, 30).release == "1.2.1"
        assert len(processes_with(tmp_path / "bin")) == 1
        folder = worker.folder
    assert processes_with(tmp_path / "bin") == []
    assert not folder.exists()


def test_a_worker_that_died_is_reported_and_restarted(bundle: Path, tmp_path: Path) -> None:
    engine = open_engine(bundle, make_interpreter(tmp_path / "bin"))
    before = engine.forced(TOKENS, 1)
    assert engine._worker is not None
    os.kill(engine._worker._process.pid, signal.SIGKILL)
    engine._worker._process.wait()
    with pytest.raises(MissingRequirement, match="TensorRT-LLM was ended by SIGKILL in run: out of memory"):
        engine.forced(TOKENS, 1)
    assert (engine.forced(TOKENS, 1) == before).all()
    engine.close()
    await_none_with(tmp_path / "bin")


def test_a_hang_ends_at_the_timeout_and_leaves_no_process(
    quantized: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "TIMEOUT_S", 2)
    python = make_interpreter(tmp_path / "bin", mode="hang while building")
    started = time.monotonic()
    with pytest.raises(UserError, match=r"TensorRT-LLM did not answer build within 2 s"):
        make_bundle("trtllm", quantized, tmp_path / "bundle", "fp8", python)
    assert time.monotonic() - started < 30
    await_none_with(tmp_path / "bin")


def test_an_answer_without_an_end_is_cut_off(tmp_path: Path) -> None:
    python = script(tmp_path / "python", "exec cat /dev/zero")
    with Worker(PROGRAM, python) as worker, pytest.raises(UserError, match="answered describe with more than 16 MiB"):
        worker.call("describe", Description, 60)


@pytest.mark.parametrize("mode", ["hang while loading", "hang while generating"])
def test_an_interrupt_leaves_no_process(bundle: Path, tmp_path: Path, mode: str) -> None:
    engine = open_engine(bundle, make_interpreter(tmp_path / "bin", mode=mode))

    def interrupted(_: int, __: object) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupted)
    signal.setitimer(signal.ITIMER_REAL, 1.0)
    try:
        with pytest.raises(KeyboardInterrupt):
            engine.forced(TOKENS, 1)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    await_none_with(tmp_path / "bin")


def test_a_build_does_not_survive_a_killed_kvgate(tmp_path: Path) -> None:
    python = make_interpreter(tmp_path / "bin", mode="hang while building")
    code = (
        "import sys; from stages.engines.interpreter.process import Worker; "
        "from stages.engines.trtllm.backend import PROGRAM; "
        "from stages.engines.interpreter.protocol import EmptyAnswer; "
        "flags = ['--checkpoint_dir', 'a', '--output_dir', 'b']; "
        "Worker(PROGRAM, sys.argv[1]).call('build', EmptyAnswer, flags=flags)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, python], cwd=ROOT)
    deadline = time.monotonic() + 30
    while not any(command[:1] == ["sleep"] for command in processes_with(tmp_path / "bin")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    await_none_with(tmp_path / "bin")


def test_a_worker_below_a_wrapper_script_ends_with_its_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(CHANNEL))
    worker = importlib.import_module("kvgate_channel")
    reading, writing = os.pipe()
    slept: list[bool] = []
    killed: list[int] = []

    def sleep(_: float) -> None:
        slept.append(len(slept) < 2)
        if len(slept) == 2:
            os.close(writing)

    monkeypatch.setattr(worker.time, "sleep", sleep)
    monkeypatch.setattr(worker, "kill_group", killed.append)  # the real one would unlink the tests' shared memory
    worker.end_with_parent(reading)
    os.close(reading)
    assert killed == [os.getpgid(0)]
    assert slept.count(False) == worker.CLOSED_SECONDS - 1, "the worker has CLOSED_SECONDS to free its engine"
    del sys.modules["kvgate_channel"]  # monkeypatch would restore it
