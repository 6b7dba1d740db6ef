"""benchmarks.peers_cpu without its peers: scores, the order of a run, what continues, what is missing, the table."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from benchmarks.documentation import CALIBRATION_TOKENS, starts
from benchmarks.peers_cpu import __main__ as command
from benchmarks.peers_cpu.catalogue import PEERS, Peer, peer_named
from benchmarks.peers_cpu.cells import Plan, append_cell, open_run, read_cells
from benchmarks.peers_cpu.driver import TURN, Run
from benchmarks.peers_cpu.process import PeerFailed, WorkerProcess, missing_modules
from benchmarks.peers_cpu.scores import score, summary
from benchmarks.peers_cpu.table import tables
from pipeline.core.errors import UserError

PLAN = Plan("model", "digest", "commit", 2, (64,), (2,), 20, 8, 4, 100, ("kvgate",), {"kvgate": {"onnxruntime": "1.31"}})


def a_peer(name: str = "kvgate", **changes: Any) -> Peer:
    return dataclasses.replace(peer_named(name), **changes)


def test_kl_and_perplexities_are_those_of_known_distributions() -> None:
    baseline = np.log(np.array([[0.5, 0.5]], np.float32))
    judged = np.log(np.array([[0.25, 0.75]], np.float32))
    result = summary([score(judged, baseline, [0])])
    assert result["mean_kl"] == pytest.approx(0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75), rel=1e-6)
    assert result["ppl"] == pytest.approx(4, rel=1e-6)
    assert result["ppl_ratio"] == pytest.approx(2, rel=1e-6)


def test_a_logit_that_is_not_finite_is_refused() -> None:
    logits = np.zeros((1, 3), np.float32)
    with pytest.raises(ValueError, match="not finite"):
        score(np.full_like(logits, np.nan), logits, [0])


def test_too_little_text_is_a_user_error_that_names_the_arguments() -> None:
    with pytest.raises(UserError, match="--contexts"):
        starts(CALIBRATION_TOKENS + 10, [11])


def test_a_run_of_the_same_plan_continues_and_another_plan_starts_anew(tmp_path: Path) -> None:
    assert open_run(tmp_path / "run", PLAN) == []
    append_cell(tmp_path / "run", {"peer": "kvgate", "kv": "fp16", "context": 64})
    assert len(open_run(tmp_path / "run", PLAN)) == 1
    assert open_run(tmp_path / "run", dataclasses.replace(PLAN, threads=1)) == []


class FakeWorker:
    """Answers as a worker does, notes the order of its steps, and fails where a test says so."""

    def __init__(self, peer: Peer, fails: Sequence[tuple[str, str]] = ()) -> None:
        self.peer, self.fails = peer, set(fails)
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def ask(self, do: str, **arguments: Any) -> Any:
        self.asked.append((do, arguments))
        if (do, arguments["kv"]) in self.fails:
            raise PeerFailed(f"no {do} of {arguments['kv']}")
        if do == "prefill":
            return {"seconds": 0.5, "bytes": {"per_token": 100.0, "how": "computed"}}
        if do == "steps":
            return [0.01 * arguments["batch"]] * arguments["count"]
        if do == "score":
            return {"tokens": 20, "kl": 0.2, "nll": 20.0, "baseline_nll": 20.0, "same_top": 20}
        return None

    def revive(self) -> None:
        pass


def a_run(worker: FakeWorker, directory: Path) -> Run:
    workers = cast("dict[str, WorkerProcess]", {worker.peer.name: worker})
    return Run(PLAN, workers, {64: [0, 200]}, directory, lambda _: None, lambda _: None)


def test_formats_of_one_width_take_turns_of_a_few_steps(tmp_path: Path) -> None:
    worker = FakeWorker(a_peer(formats={"a": "8 bit", "b": "8 bit"}))
    a_run(worker, tmp_path).measure([])
    turns = [(arguments["kv"], arguments["count"]) for do, arguments in worker.asked if do == "steps" and arguments["keep"]]
    once = [("a", TURN), ("b", TURN), ("a", TURN), ("b", TURN), ("a", 4), ("b", 4)]
    assert turns == once + once


def test_a_failure_is_a_cell_that_says_why_and_the_others_are_measured(tmp_path: Path) -> None:
    worker = FakeWorker(a_peer(formats={"a": "8 bit", "b": "8 bit", "c": "8 bit"}), [("prefill", "a"), ("replicate", "b")])
    cells = {cell["kv"]: cell for cell in a_run(worker, tmp_path).measure([])}
    assert cells["a"]["cannot"] == "no prefill of a"
    assert cells["b"]["batch_8"] == {"cannot": "no replicate of b"}
    assert cells["b"]["batch_1"]["tokens_per_s"] == pytest.approx(100)
    assert cells["c"]["batch_8"]["tokens_per_s"] == pytest.approx(100)
    assert cells["c"]["mean_kl"] == pytest.approx(0.01)
    assert read_cells(tmp_path) == list(cells.values())


def test_a_continued_run_measures_what_is_missing_and_what_failed(tmp_path: Path) -> None:
    peer = a_peer(formats={"a": "8 bit", "b": "8 bit"})
    first = a_run(FakeWorker(peer, [("open", "b")]), tmp_path).measure([])
    worker = FakeWorker(peer)
    cells = a_run(worker, tmp_path).measure(first)
    assert {arguments["kv"] for _, arguments in worker.asked} == {"b"}
    assert [cell["kv"] for cell in cells] == ["a", "b"]
    assert not any("cannot" in cell for cell in cells)


def test_a_missing_peer_names_the_command_that_installs_it(tmp_path: Path) -> None:
    peer = a_peer("llama_cpp", modules=("json", "no_such_module", "no_such_package.module"))
    assert missing_modules(peer, tmp_path) == ["no_such_module", "no_such_package.module"]
    install = peer.install_command(Path("sites"))
    assert install == "pip install --target sites/llama_cpp --no-deps llama-cpp-python==0.3.36 diskcache gguf"


def test_a_process_that_ends_is_a_failure_that_names_its_log(tmp_path: Path) -> None:
    worker = WorkerProcess(dataclasses.replace(PEERS[0], name="nobody"), tmp_path, 1, tmp_path / "log")
    with pytest.raises(PeerFailed, match=r"ended with code 1 .*log"):
        worker.ask("hello")
    worker.stop()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--peers", "vllm"], "unknown vllm"),
        (["--contexts", "64,128", "--texts", "1"], "--texts=1"),
        ([], "model.path="),
    ],
)
def test_an_argument_that_cannot_be_used_ends_with_code_2_and_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as exit_code:
        command.main(["--model", str(tmp_path), *arguments])
    assert exit_code.value.code == 2
    assert message in capsys.readouterr().err


def a_cell(peer: str, kv: str, rate: float) -> dict[str, Any]:
    head = {"peer": peer, "kv": kv, "context": 64, "width": peer_named(peer).formats[kv]}
    quality = {"bytes_per_token": 12.0, "mean_kl": 0.001, "ppl_ratio": 1.01, "ttft_s": 0.5}
    return {**head, **quality, "batch_1": {"tokens_per_s": rate}, "batch_8": {"tokens_per_s": 2 * rate}}


def test_the_table_puts_the_fastest_first_and_what_cannot_be_measured_last() -> None:
    failed = {"peer": "genai", "kv": "int8_per_channel", "context": 64, "width": "8 bit", "cannot": "a | b\nc"}
    text = tables([failed, a_cell("kvgate", "int8", 10), a_cell("llama_cpp", "q8_0", 40)], 8, {"openvino": "not installed"})
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert [row.split("|")[1].strip() for row in rows[1:]] == ["llama.cpp", "kvgate, ONNX engine", "onnxruntime-genai"]
    assert "cannot: a / b c" in rows[-1]
    assert "- OpenVINO: not installed" in text
