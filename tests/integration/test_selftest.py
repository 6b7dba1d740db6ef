"""`python -m stages.selftest`: a verdict a line, whatever happens to the process of a check."""

import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tensorrt_stubs_builder as builder
from tensorrt_stubs_builder import Tensor

from pipeline.core.errors import UserError
from pipeline.core.formats import Format
from pipeline.core.kv import KVPolicy, KVShape, Window
from stages.engines.tensorrt.library import Library
from stages.selftest import __main__ as selftest
from stages.selftest.checks import CHECKS, judge
from stages.selftest.probes import FAR_SHARED, declare_far_shared

ROOT = Path(__file__).resolve().parents[2]


def test_without_a_gpu_no_check_can_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(selftest, "gpus", list)
    assert selftest.main([]) == 4
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(CHECKS)
    assert all(line.startswith("CANNOT RUN") and "no NVIDIA GPU with a driver here" in line for line in lines)


@pytest.mark.parametrize(
    ("verdicts", "code"),
    [(["PASS"], 0), (["PASS", "CANNOT RUN"], 4), (["CANNOT RUN", "FAIL", "PASS"], 3)],
)
def test_the_worst_verdict_is_the_exit_code(
    verdicts: list[str], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(selftest, "gpus", lambda: [{"name": "NVIDIA L40S"}])
    verdict_of = dict(zip(CHECKS, verdicts + ["PASS"] * len(CHECKS), strict=False))
    assert selftest.run_all(lambda name: (verdict_of[name], f"reason of {name}")) == code
    lines = capsys.readouterr().out.splitlines()
    assert [line[:11].strip() for line in lines] == list(verdict_of.values())
    assert lines[0].endswith("reason of plugin load")


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("print('building'); print('it works')", ("PASS", "it works")),
        ("print('it does not'); exit(3)", ("FAIL", "it does not")),
        ("print('nothing here'); exit(4)", ("CANNOT RUN", "nothing here")),
        ("import os; os.abort()", ("FAIL", "the process was killed by signal 6")),
        ("exit(1)", ("FAIL", "the process ended with exit code 1")),
        ("exit(0)", ("FAIL", "the process ended with exit code 0")),
        ("import time; time.sleep(60)", ("FAIL", "no verdict after 2 s")),
    ],
    ids=["pass", "fail", "cannot_run", "crash", "defect", "silence", "hang"],
)
def test_a_check_has_a_process_of_its_own(program: str, expected: tuple[str, str]) -> None:
    assert selftest.run_process([sys.executable, "-c", program], seconds=2) == expected


def test_a_check_without_tensorrt_says_how_to_get_it() -> None:
    command = [sys.executable, "-m", "stages.selftest", "--check", "launch"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 4
    assert "pip install 'tensorrt-cu13>=10.14" in done.stdout.splitlines()[-1]


def test_what_a_library_throws_is_a_failure_with_its_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access")

    monkeypatch.setattr(selftest, "load", lambda _: None)
    monkeypatch.setitem(sys.modules, "stages.selftest.bench", SimpleNamespace(GpuBench=broken))
    assert selftest.main(["--check", "launch"]) == 3
    output = capsys.readouterr()
    assert output.out.splitlines()[-1] == "RuntimeError: CUDA error: an illegal memory access"
    assert "Traceback" in output.err


class _Machine:
    """A bench without a machine, whose engine raises `error`."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def engine(self, **_: object) -> Any:
        raise self.error


@pytest.mark.parametrize("when", ["opened", "used"])
def test_what_tensorrt_refuses_is_a_failure_and_only_a_wrong_option_is_not(
    when: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def bench(*_: object) -> Any:
        error = UserError(f"it was {when}: TensorRT cannot load it")
        if when == "opened":
            raise error
        return _Machine(error)

    monkeypatch.setattr(selftest, "load", lambda _: None)
    monkeypatch.setitem(sys.modules, "stages.selftest.bench", SimpleNamespace(GpuBench=bench))
    assert selftest.main(["--check", "launch"]) == {"opened": 4, "used": 3}[when]
    assert f"it was {when}: TensorRT cannot load it" in capsys.readouterr().out.splitlines()[-1]


def test_an_append_of_a_policy_that_the_plugin_does_not_hold_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from stages.selftest.bench import GpuBench  # not above: the process with NVIDIA's package imports this file

    int8, fp16 = Format(dtype="int8", granularity="per_token", scale="dynamic"), Format(dtype="fp16")
    policy = KVPolicy(name="windowed", key=int8, value=int8, window=Window(tokens=64, key=fp16))
    monkeypatch.setattr("stages.selftest.bench.register", lambda: None)
    info = SimpleNamespace(shape=KVShape(2, 2, 64), q_heads=4)
    monkeypatch.setattr(GpuBench, "record", SimpleNamespace(model=info))
    bench = object.__new__(GpuBench)
    bench.config = SimpleNamespace(kv=policy)  # type: ignore[assignment]
    verdict, reason = judge("append in place", lambda: bench)
    assert verdict == "CANNOT RUN"
    assert reason.startswith(
        "kv=windowed: the plugin does not hold this policy (kv.window.tokens=64: the CUDA kernels read one copy"
    )


@pytest.mark.parametrize(
    ("option", "message"),
    [(["--model", "nowhere"], "model.path"), (["--kv", "fp9"], "kv=fp9: no such option")],
)
def test_a_model_or_policy_that_is_none_cannot_run(
    option: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(selftest, "load", lambda _: None)
    monkeypatch.setattr("stages.selftest.bench.load", lambda _: None)
    assert selftest.main(["--check", "launch", *option]) == 4
    assert message in capsys.readouterr().out.splitlines()[-1]


def far_shared_plan(size: int) -> Any:
    """In the process that has NVIDIA's package: the probe's declaration, and what a builder makes of it."""
    import tensorrt as trt

    declare_far_shared(Library("tensorrt", trt, SimpleNamespace(lines=[])), size)
    return builder.build("kvgate_check::far_shared", {"x": Tensor("FLOAT", (32,))}, {})


def test_the_shared_memory_probe_is_a_plugin_whose_kernel_assembles() -> None:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        pool.submit(builder.prepare).result(timeout=120)
        plan = pool.submit(far_shared_plan, 64 * 1024).result(timeout=120)
    assert plan.outputs == [("FLOAT", ((32, 32, 32),))]
    assert (plan.shared_bytes, plan.extras) == ((65536,) * 3, [(65536 - 128,) * 3])
    assert plan.parameters == ["u64", "u32", "u64"]
    from plugins.kv_attention.aot import assemble

    cubin, registers, spilled = assemble(FAR_SHARED, 80)
    assert cubin
    assert registers > 0
    assert spilled == 0
