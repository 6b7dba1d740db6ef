"""benchmarks.peers_cpu without its peers: distances, the order of a run, what fails, what is missing, the table."""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from benchmarks.documentation import CALIBRATION_TOKENS, starts
from benchmarks.peers_cpu import __main__ as command
from benchmarks.peers_cpu.__main__ import TURN, Entry, distance, measure, tables
from benchmarks.peers_cpu.worker import Failed, Remote
from pipeline.core.errors import UserError

ARGUMENTS = argparse.Namespace(forced=20, batch_steps=4)


def test_kl_and_perplexities_are_those_of_known_distributions() -> None:
    baseline = np.log(np.array([[0.5, 0.5]], np.float32))
    judged = np.log(np.array([[0.25, 0.75]], np.float32))
    result = distance(judged, baseline, np.array([0]))
    assert result["mean_kl"] == pytest.approx(0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75), rel=1e-6)
    assert result["ppl_ratio"] == pytest.approx(2, rel=1e-6)


def test_a_logit_that_is_not_finite_is_refused() -> None:
    logits = np.zeros((1, 3), np.float32)
    with pytest.raises(ValueError, match="not finite"):
        distance(np.full_like(logits, np.nan), logits, np.array([0]))


def test_too_little_text_is_a_user_error_that_names_the_arguments() -> None:
    with pytest.raises(UserError, match="--contexts"):
        starts(CALIBRATION_TOKENS + 10, [11])


class FakeWorker:
    """Answers as a worker does, notes what it was asked, and fails where a test says so."""

    def __init__(self, asked: list[tuple[str, str, int]], kv: str, fails: Sequence[str] = ()) -> None:
        self.asked, self.kv, self.fails = asked, kv, fails

    def ask(self, do: str, **arguments: Any) -> Any:
        self.asked.append((self.kv, do, arguments.get("count", 0)))
        if do in self.fails:
            raise Failed(f"no {do} of {self.kv}")
        if do == "prefill":
            return {"seconds": (0.5, 0.9), "bytes": 100.0}
        return [(0.01 * arguments["batch"], 0.02)] * arguments["count"] if do == "steps" else None

    def stop(self) -> None:
        pass


def measured(tmp_path: Path, fails: dict[str, Sequence[str]]) -> tuple[dict[str, Any], list[tuple[str, str, int]]]:
    asked: list[tuple[str, str, int]] = []
    entries = [Entry(cast("Remote", FakeWorker(asked, kv, of)), "kvgate", kv, tmp_path / kv) for kv, of in fails.items()]
    measure(entries, 64, 0, ARGUMENTS, {}, tmp_path)
    return {entry.kv: entry.cell(tmp_path / "none", np.array([0])) for entry in entries}, asked


def test_formats_of_one_width_take_turns_of_a_few_steps(tmp_path: Path) -> None:
    _, asked = measured(tmp_path, {"a": (), "b": ()})
    turns = [(kv, count) for kv, do, count in asked if do == "steps"]
    assert turns[:6] == [("a", TURN), ("b", TURN), ("a", TURN), ("b", TURN), ("a", 4), ("b", 4)]


def test_a_failure_says_why_and_the_others_are_measured(tmp_path: Path) -> None:
    cells, _ = measured(tmp_path, {"a": ("prefill",), "b": ("replicate",), "c": ()})
    assert cells["a"]["cannot"] == {"first_token": "no prefill of a"}
    assert "batch_1" not in cells["a"]
    assert cells["b"]["cannot"] == {"batch_8": "no replicate of b"}
    assert cells["b"]["batch_1"] == {"seconds": 0.01, "cpu_seconds": 0.02, "times": 20}
    assert cells["c"]["batch_8"]["seconds"] == pytest.approx(0.08)


def test_a_process_that_ends_is_a_failure_that_names_its_log(tmp_path: Path) -> None:
    worker = Remote("nobody", tmp_path, 1, tmp_path / "log")
    with pytest.raises(Failed, match=r"ended with code 1 .*log"):
        worker.ask("prepare")
    worker.stop()


@pytest.mark.parametrize(("arguments", "message"), [(["--peers", "vllm"], "unknown vllm"), ([], "model.path=")])
def test_an_argument_that_cannot_be_used_ends_with_code_2_and_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as exit_code:
        command.main(["--model", str(tmp_path), "--work", str(tmp_path / "work"), *arguments])
    assert exit_code.value.code == 2
    assert message in capsys.readouterr().err


def test_the_table_says_how_kvgate_stands_beside_the_fastest_peer() -> None:
    def cell(peer: str, kv: str, seconds: float) -> dict[str, Any]:
        head = {"peer": peer, "kv": kv, "context": 64, "width": "8 bit", "bytes_per_token": 12.0, "mean_kl": 0.001}
        return {**head, "batch_1": {"cpu_seconds": seconds}}

    failed = {"peer": "genai", "kv": "int8_per_channel", "context": 64, "width": "8 bit", "bytes_per_token": 0.0}
    text = tables([failed, cell("kvgate", "int8", 0.2), cell("llama_cpp", "q8_0", 0.4), cell("openvino", "u8", 0.8)])
    assert "kvgate `int8` takes 0.50 times the CPU time of the fastest peer, llama.cpp `q8_0`" in text
    assert "| onnxruntime-genai | `int8_per_channel` | 0 | – | – | – | – |" in text
