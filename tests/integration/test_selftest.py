"""`python -m stages.selftest`: a verdict a line, whatever happens to the process of a check, and what its checks fail."""

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pipeline.core.errors import UserError
from pipeline.core.formats import Format
from pipeline.core.kv import KVPolicy
from stages.selftest import __main__ as selftest
from stages.selftest import checks
from stages.selftest.checks import CHECKS, CheckFailure

ROOT = Path(__file__).resolve().parents[2]


def test_without_a_gpu_no_check_can_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(selftest, "gpus", list)
    assert selftest.main([]) == 4
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(CHECKS)
    assert all(line.startswith("CANNOT RUN") and "no NVIDIA GPU with a driver here" in line for line in lines)


@pytest.mark.parametrize(("codes", "code"), [([0], 0), ([0, 4], 4), ([4, 3, 0], 3)])
def test_the_worst_verdict_is_the_exit_code(codes: list[int], code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "gpus", lambda: [{"name": "NVIDIA L40S"}])
    left = iter([*codes, *[0] * len(CHECKS)])
    monkeypatch.setattr(selftest, "run_process", lambda _: (next(left), "a reason"))
    assert selftest.main([]) == code


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("print('building'); print('it works')", (0, "it works")),
        ("print('it does not'); exit(3)", (3, "it does not")),
        ("print('nothing here'); exit(4)", (4, "nothing here")),
        ("import os; os.abort()", (3, "the process was killed by signal 6")),
        ("exit(1)", (3, "the process ended with exit code 1")),
        ("exit(0)", (3, "the process ended with exit code 0")),
        ("import time; time.sleep(60)", (3, "no verdict after 2 s")),
    ],
    ids=["pass", "fail", "cannot_run", "crash", "defect", "silence", "hang"],
)
def test_a_check_has_a_process_of_its_own(program: str, expected: tuple[int, str]) -> None:
    assert selftest.run_process([sys.executable, "-c", program], seconds=2) == expected


def test_a_check_without_tensorrt_says_how_to_get_it() -> None:
    command = [sys.executable, "-m", "stages.selftest", "--check", "launch"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 4
    assert "pip install 'tensorrt-cu13>=10.14" in done.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    ("opened", "error", "code"),
    [
        (True, UserError("kv=fp9: no such option"), 4),
        (False, UserError("TensorRT cannot load it"), 3),
        (False, RuntimeError("CUDA error: an illegal memory access"), 3),
    ],
    ids=["wrong option", "refused later", "thrown"],
)
def test_what_tensorrt_throws_is_a_failure_and_only_a_wrong_option_is_not(
    opened: bool, error: Exception, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object, **__: object) -> Any:
        raise error

    monkeypatch.setattr(checks, "Bench", broken if opened else lambda *_: SimpleNamespace(engine=broken))
    assert selftest.main(["--check", "launch"]) == code
    output = capsys.readouterr()
    assert str(error) in output.out.splitlines()[-1]
    assert ("Traceback" in output.err) == (code == 3)


@pytest.mark.parametrize(
    ("option", "message"),
    [(["--model", "nowhere"], "model.path"), (["--kv", "fp9"], "kv=fp9: no such option")],
)
def test_a_model_or_policy_that_is_none_cannot_run(
    option: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(checks, "load", lambda _: None)
    assert selftest.main(["--check", "launch", *option]) == 4
    assert message in capsys.readouterr().out.splitlines()[-1]


class Engine:
    """Logits that depend on all tokens of a sequence and on the scale of the keys, but for an engine's faults."""

    vocab_size = 16

    def __init__(self, noise: float, captured: bool, faults: Sequence[str]) -> None:
        self.noise, self.captured, self.faults = noise, captured, faults
        self.scale = 1.0
        self.sequences: list[list[int]] = []

    def prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[list[int], npt.NDArray[np.float32]]:
        self.sequences += [list(prompt) for prompt in prompts]
        handles = list(range(len(self.sequences) - len(prompts), len(self.sequences)))
        return handles, np.stack([self.logits(handle) for handle in handles])

    def decode(self, handles: Sequence[int], tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        for handle, token in zip(handles, tokens, strict=True):
            self.sequences[handle].append(token)
        return np.stack([self.logits(handle) for handle in handles])

    def logits(self, handle: int) -> npt.NDArray[np.float32]:
        seed = np.random.default_rng(self.sequences[handle]).normal(size=self.vocab_size).astype(np.float32)
        out = seed * (1.0 if "blind" in self.faults else self.scale) * (1 + self.noise)
        out[0] = np.nan if "nan" in self.faults else out[0]
        return out + (1e-3 if self.captured and "replay" in self.faults else 0)

    def stored(self, handle: int) -> list[dict[str, Any]]:
        codes = np.ones((2, len(self.sequences[handle]), 4), np.uint8)
        codes[:, -1] = 0 if "lost" in self.faults else 1
        return [{"key": SimpleNamespace(codes=codes)}]

    def session(self, _: str) -> Any:
        return SimpleNamespace(replayed_shapes=int(self.captured and "uncaptured" not in self.faults))

    def corrupt_key_scale(self, factor: float) -> None:
        self.scale *= factor


def bench(*faults: str) -> Any:
    """A machine on which everything works, but for its faults."""
    fp8 = Format(dtype="fp8_e4m3", granularity="per_token", scale="dynamic")
    return SimpleNamespace(
        policy=KVPolicy(name="some", key=fp8, value=fp8),
        registered=lambda: {"kv::decode_partial": True, "kv::decode_reduce": "operations" not in faults},
        record=SimpleNamespace(plugins={}),
        engine=lambda *, cuda_graphs: Engine(2.0 if "noise" in faults else 1e-3, cuda_graphs, faults),
        oracle=lambda: Engine(0.0, False, ()),
        binding=lambda _: ("UINT8" if "binding" in faults else "FP8", "Row major linear FP8 format (kLINEAR)"),
    )


@pytest.mark.parametrize(
    ("check", "fault", "reason"),
    [
        (checks.plugin_load, "operations", "1 of 2 operations are not in TensorRT's registry, first kv::decode_reduce"),
        (checks.launch, "nan", "logits of 3 of 3 sequences are not finite"),
        (checks.fp8_bindings, "binding", "key_pool.0 is bound as UINT8"),
        (checks.append_in_place, "lost", "keys of layer 0: 1 of 73 tokens are not in the pool, first token 72"),
        (checks.logits_against_oracle, "noise", r"mean KL to the oracle is \S+ nats a token, above 0.01"),
        (checks.logits_against_oracle, "blind", "the logits are not the cache's"),
        (checks.logits_against_oracle, "nan", "mean KL to the oracle is nan"),
        (checks.cuda_graph, "uncaptured", "no decode step was captured"),
        (checks.cuda_graph, "replay", "replayed steps give other logits"),
    ],
)
def test_a_check_passes_a_machine_that_works_and_fails_a_faulty_one_with_the_reason(
    check: Callable[[Any], str], fault: str, reason: str
) -> None:
    assert check(bench())
    with pytest.raises(CheckFailure, match=reason):
        check(bench(fault))


def test_a_plan_without_plugin_nodes_fails() -> None:
    with pytest.raises(CheckFailure, match="no plugin node"):
        checks.run_time_load(bench())
