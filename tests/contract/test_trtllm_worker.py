"""TensorRT-LLM's engines on the fake, and their worker, which dies, hangs, prints noise or is orphaned, and always ends."""

import importlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn
from unittest.mock import Mock

import numpy as np
import pytest
from helpers.commands.processes import await_none_with, processes_with
from helpers.engines.interpreters import make_bundle, make_exports, make_interpreter, open_engine, script

from stages.core.errors import MissingRequirement, UserError
from stages.engines.interpreter import process
from stages.engines.interpreter.process import CHANNEL, Worker, inspect_interpreter
from stages.engines.interpreter.protocol import Description
from stages.engines.trtllm.backend import PROGRAM

ROOT = Path(__file__).resolve().parents[2]
TOKENS = [1, 2, 3, 4]
PROMPT = [7, 300, 12, 44, 1001, 5, 5, 620]
ANSWER = [9, 13, 700, 700, 2, 1343, 0, 88, 15, 640, 3]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trtllm")


@pytest.fixture(scope="module")
def python(work: Path) -> str:
    return make_interpreter(work / "engine")


@pytest.fixture(scope="module")
def exports(work: Path, tiny_checkpoint: Path) -> dict[str, Path]:
    """Quantized checkpoints of the tiny model by policy name."""
    return {kv: make_exports(tiny_checkpoint, work / f"quantized-{kv}", kv) for kv in ("fp16", "fp8", "int8_tensor")}


@pytest.fixture(scope="module")
def bundles(work: Path, exports: dict[str, Path], python: str) -> dict[str, Path]:
    return {kv: make_bundle("trtllm", quantized, work / kv, kv, python) for kv, quantized in exports.items()}


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


def test_a_worker_that_died_is_reported_and_restarted(bundles: dict[str, Path], tmp_path: Path) -> None:
    engine = open_engine(bundles["fp8"], make_interpreter(tmp_path / "bin"))
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
    exports: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "TIMEOUT_S", 1)
    python = make_interpreter(tmp_path / "bin", mode="hang while building")
    started = time.monotonic()
    with pytest.raises(UserError, match=r"TensorRT-LLM did not answer build within 1 s"):
        make_bundle("trtllm", exports["fp8"], tmp_path / "bundle", "fp8", python)
    assert time.monotonic() - started < 30
    await_none_with(tmp_path / "bin")


def test_an_answer_without_an_end_is_cut_off(tmp_path: Path) -> None:
    python = script(tmp_path / "python", "exec cat /dev/zero")
    with Worker(PROGRAM, python) as worker, pytest.raises(UserError, match="answered describe with more than 16 MiB"):
        worker.call("describe", Description, 60)


@pytest.mark.parametrize("mode", ["hang while loading", "hang while generating"])
def test_an_interrupt_leaves_no_process(bundles: dict[str, Path], tmp_path: Path, mode: str) -> None:
    engine = open_engine(bundles["fp8"], make_interpreter(tmp_path / "bin", mode=mode))

    def interrupted(_: int, __: object) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupted)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
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


def test_each_cache_is_read_in_its_own_format(bundles: dict[str, Path], python: str) -> None:
    rows = {}
    for kv in ("fp16", "fp8", "int8_tensor"):
        engine = open_engine(bundles[kv], python)
        rows[kv] = engine.forced([*PROMPT, *ANSWER], len(PROMPT))
        engine.close()
    assert all(0.01 < np.abs(rows[kv] - rows["fp16"]).max() < 1.0 for kv in ("fp8", "int8_tensor"))
    assert np.abs(rows["fp8"] - rows["int8_tensor"]).max() > 0.01


def test_prompts_beyond_the_bound_are_in_flight_together(bundles: dict[str, Path], python: str) -> None:
    engine = open_engine(bundles["fp8"], python)
    prompts, limits = [PROMPT, ANSWER, PROMPT[:3], ANSWER[:1], PROMPT[::-1]], [9, 2, 5, 12, 1]
    alone = [engine.generate([prompt], limit, ())[0] for prompt, limit in zip(prompts, limits, strict=True)]
    engine._call = call = Mock(wraps=engine._call)
    assert engine.generate(prompts, limits, (), max_sequences=2) == alone
    assert call.call_count == 2 * 2 + 1, "prefill and decode of two pairs; prefill of the last"
    assert engine.memory().live_tokens == 0
    engine.close()


def test_one_engine_uses_the_gpu_and_fp16_has_no_control(bundles: dict[str, Path], python: str) -> None:
    first = open_engine(bundles["fp8"], python)
    second = open_engine(bundles["fp16"], python)
    with pytest.raises(UserError, match="kv=fp16: the cache has no scale"):
        second.corrupt_key_scale(0.1)
    tokens = [*PROMPT, *ANSWER]
    before = first.forced(tokens, len(PROMPT))
    second.forced(tokens, len(PROMPT))
    assert first._worker is None
    np.testing.assert_array_equal(first.forced(tokens, len(PROMPT)), before)
    assert second._worker is None
    first.close()


def test_an_engine_over_two_ranks_answers_like_one(
    work: Path, tiny_checkpoint: Path, bundles: dict[str, Path], python: str
) -> None:
    wide = make_interpreter(work / "wide", gpus=("9.0", "9.0"))
    quantized = make_exports(tiny_checkpoint, work / "quantized-tp", "fp8", ranks=2)
    bundle = make_bundle("trtllm", quantized, work / "tp", "fp8", wide, tensor_parallel_size=2)
    engine, single = open_engine(bundle, wide), open_engine(bundles["fp8"], python)
    tokens = [*PROMPT, *ANSWER]
    np.testing.assert_array_equal(engine.forced(tokens, len(PROMPT)), single.forced(tokens, len(PROMPT)))
    with pytest.raises(UserError, match=r"backend\.tensor_parallel_size=2: GPUs 0 to 1 are SM 9\.0, 8\.9"):
        open_engine(bundle, make_interpreter(work / "unequal", gpus=("9.0", "8.9")))
    with pytest.raises(MissingRequirement, match="needs 2 NVIDIA GPU"):
        open_engine(bundle, python)
    single.close()
