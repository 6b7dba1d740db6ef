"""benchmarks/decode_attention.py without its times: cases, bytes, targets, the table, and the detection of wrong outputs."""

import dataclasses
import json
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from benchmarks import (
    attention_cases,
    attention_kernels,
    attention_step,
    attention_timing,
    decode_attention,
)
from benchmarks.attention_cases import Case, Row
from benchmarks.recording import write_json

torch.set_num_threads(1)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOY = Case(batch=2, tokens=70, group=4, kv_heads=1)
COPY = 4e12
NAMES = [kernel.name for kernel in attention_kernels.KERNELS]


def in_ten_microseconds(run: Any, runs: int | None) -> tuple[float, Tensor]:  # noqa: ARG001  (the timer's signature)
    """A timer that runs the kernel once and returns ten microseconds."""
    return 10.0, run()


def toy(kernels: Any = attention_kernels.KERNELS) -> list[Row]:
    with torch.inference_mode():
        return attention_timing.run_case(
            TOY, kernels, in_ten_microseconds, attention_timing.MeasuredDevice(DEVICE, COPY), seed=1
        )


def test_the_grid_has_every_batch_length_and_group() -> None:
    cases = list(attention_cases.grid(ragged=()))
    assert len(cases) == len(set(cases)) == 32
    assert {case.batch for case in cases} == {1, 8, 32, 64}
    assert {case.tokens for case in cases} == {2048, 8192, 32768, 131072}
    assert {(case.group, case.kv_heads, case.head_dim) for case in cases} == {(4, 8, 128), (8, 8, 128)}


PEERS = {kernel.name for kernel in attention_kernels.KERNELS if kernel.peer}


def a_row(kernel: str, storage: str, microseconds: float, correct: bool = True, tokens: int = 8192) -> Row:
    case = Case(batch=32, tokens=tokens, group=8)
    measured = attention_cases.measured(case, storage, microseconds, COPY)
    named = {"kernel": kernel, "storage": storage, "peer": kernel in PEERS, "chosen": {}, "relative_error": 1e-3}
    return {**case.describe(), **named, "correct": correct, **measured}


def test_targets_are_met_by_every_large_case_or_missed_and_wrong_peers_are_no_peers() -> None:
    rows = [
        a_row("fp8k_int4v", "fp8k_int4v", 115.0),
        a_row("fp8", "fp8", 150.0),
        a_row("flashinfer xqa fp8", "fp8", 151.0),
        a_row("flashinfer fp8", "fp8", 10.0, correct=False),
        a_row("bf16", "bf16", 300.0),
        a_row("sdpa bf16", "bf16", 260.0),
    ]
    attention_cases.add_ratios(rows)
    assert rows[0]["over_best_fp8"] == pytest.approx(150 / 115)
    assert rows[0]["over_best_bf16"] == pytest.approx(260 / 115)
    assert (rows[1]["over_best_fp8"], rows[5]["over_best_bf16"]) == (1, 1)
    assert "over_best_fp8" not in rows[3]
    assert rows[0]["peers_fp8"] == ["flashinfer xqa fp8"]
    verdicts = [verdict["verdict"] for verdict in attention_cases.judge(rows)]
    assert verdicts == ["met", "met", "missed"]  # 0.90 of the copy, 1.30 times, 2.26 times
    small = a_row("fp8k_int4v", "fp8k_int4v", 1e6, tokens=1024)
    assert [verdict["cases"] for verdict in attention_cases.judge([*rows, small])] == [1, 1, 1]
    assert [verdict["verdict"] for verdict in attention_cases.judge([small])] == ["not measured"] * 3
    wrong = [{**rows[0], "correct": False}]
    assert [verdict["verdict"] for verdict in attention_cases.judge(wrong)] == ["missed"] * 3


FAST = (("fp8k_int4v", "fp8k_int4v", 110.0), ("flashinfer xqa fp8", "fp8", 140.0), ("vllm fa3 bf16", "bf16", 270.0))
"""A run that meets every target: 94 % of the copy, 1.27 and 2.45 times."""


@pytest.mark.parametrize(
    ("changed", "verdicts", "code"),
    [
        ({}, ["met", "met", "met"], 0),
        ({"fp8k_int4v": 125.0}, ["missed", "missed", "missed"], 3),
        ({"fp8k_int4v": float("nan")}, ["missed", "missed", "missed"], 3),
        ({"flashinfer xqa fp8": None}, ["met", "not measured", "met"], 0),
        ({"flashinfer xqa fp8": "fp8"}, ["met", "no peer", "met"], 3),
        ({"fp8k_int4v": None}, ["not measured"] * 3, 0),
    ],
)
def test_the_command_judges_its_targets(
    changed: dict[str, Any], verdicts: list[str], code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = []
    for kernel, storage, microseconds in FAST:
        other = changed.get(kernel, microseconds)
        if other is not None:  # a name: kvgate's own kernel, as fast as the peer
            rows.append(a_row(other, storage, microseconds) if isinstance(other, str) else a_row(kernel, storage, other))
    attention_cases.add_ratios(rows)
    assert [verdict["verdict"] for verdict in attention_cases.judge(rows)] == verdicts
    file = tmp_path / "results.json"
    write_json(file, decode_attention.content(rows, {"name": "a GPU"}, COPY))
    assert decode_attention.main(["--judge", str(file)]) == json.loads(file.read_text())["exit_code"] == code
    out = capsys.readouterr().out
    assert all(f"{verdict}: fp8k_int4v" in out for verdict in verdicts)


def test_a_wrong_output_is_worse_than_a_missed_target() -> None:
    rows = [a_row(kernel, storage, microseconds) for kernel, storage, microseconds in FAST]
    rows[1]["correct"] = False
    attention_cases.add_ratios(rows)
    assert attention_cases.exit_code(rows) == 1


def test_a_ragged_case_is_judged_however_small_it_is() -> None:
    case = Case(32, 131072, 8, ragged=attention_cases.RAGGED["one long"])
    measured = attention_cases.measured(case, "fp8k_int4v", 1e6, COPY)
    row = {**case.describe(), "kernel": "fp8k_int4v", "storage": "fp8k_int4v", "peer": False, "correct": True, **measured}
    assert row["kv_bytes"] < attention_cases.LARGE_BYTES
    assert attention_cases.judge([row])[0]["verdict"] == "missed"


def test_every_kernel_has_a_row_and_is_right_or_says_why_it_did_not_run(tmp_path: Path) -> None:
    rows = toy()
    assert sorted(row["kernel"] for row in rows) == sorted(NAMES)
    for row in rows:
        if "skipped" in row:
            assert row["skipped"] == f"{row['kernel'].split()[0]} is not installed"
            continue
        assert row["correct"], row
        assert 0 < row["relative_error"] < 1e-2
        assert row["microseconds"] == 10.0
        assert row["chosen"] in [{k: v for k, v in tried.items() if k != "microseconds"} for tried in row["tried"]]
    described = {"name": "a GPU"}
    file = tmp_path / "results.json"
    write_json(file, decode_attention.content(rows, described, COPY))
    content = json.loads(file.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert {"date", "versions", "commit", "command", "gpu", "copy_gb_per_s", "timing", "targets", "results"} <= content.keys()
    assert {"torch", "triton", "flashinfer-python"} <= content["versions"].keys()
    assert content["copy_gb_per_s"] == 4000
    out = StringIO()
    Console(file=out, width=200).print(attention_cases.table(rows))
    assert all(name in out.getvalue() for name in NAMES)


def test_a_kernel_that_is_wrong_for_the_last_sequence_is_found_out() -> None:
    shipped = attention_kernels.KERNELS[0]

    def spoil(right: Any) -> Any:
        def run() -> Tensor:
            out: Tensor = right()
            out[-1, -1] *= 1.1
            return out

        return run

    def spoiled(step: Any) -> Any:
        for candidate in shipped.candidates(step):
            yield dataclasses.replace(candidate, prepare=partial(spoil, candidate.prepare()))

    (row,) = toy([dataclasses.replace(shipped, candidates=spoiled)])
    assert not row["correct"]
    assert row["relative_error"] > shipped.tolerance
    out = StringIO()
    Console(file=out, width=200).print(attention_cases.table([row]))
    assert "WRONG" in out.getvalue()


def by_name(name: str) -> Any:
    return next(kernel for kernel in attention_kernels.KERNELS if kernel.name == name)


def with_ways(kernel: Any, *prepared: Any) -> Any:
    """Return the kernel with other, numbered candidates. An exception in place of one is raised when it is prepared; a
    function that raises fails when it runs."""

    def candidates(_: Any) -> Any:
        def give(way: Any) -> Any:
            if isinstance(way, Exception):
                raise way
            return way

        for number, way in enumerate(prepared):
            yield attention_step.Candidate(partial(give, way), {"way": number})

    return dataclasses.replace(kernel, candidates=candidates)


def fails() -> Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 64 GiB")


def test_a_peer_that_fails_is_left_out_with_its_reason_and_its_other_ways_still_count() -> None:
    def in_the_generator(_: Any) -> Any:
        raise RuntimeError("Could not find nvcc")
        yield

    sdpa, shipped = by_name("sdpa bf16"), by_name("bf16")
    zeros = torch.zeros(TOY.batch, TOY.q_heads, TOY.head_dim, device=DEVICE)
    unprepared = with_ways(sdpa, RuntimeError("Could not find nvcc"), lambda: zeros)
    rows = toy([dataclasses.replace(sdpa, candidates=in_the_generator), with_ways(sdpa, fails), unprepared, shipped])
    assert rows[0]["skipped"] == "failed: RuntimeError: Could not find nvcc"
    assert rows[1]["skipped"] == "failed: OutOfMemoryError: CUDA out of memory."
    assert rows[2]["failed"] == [{"way": 0, "reason": "RuntimeError: Could not find nvcc"}]
    assert rows[2]["chosen"] == {"way": 1}
    assert not rows[2]["correct"]
    assert rows[3]["correct"]
    out = StringIO()
    Console(file=out, width=200).print(attention_cases.table(rows))
    assert "Could not find nvcc" in out.getvalue()


def test_without_a_gpu_it_says_so_in_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert decode_attention.main([]) == 4
    assert capsys.readouterr().err.splitlines() == ["decode_attention.py lacks here: an NVIDIA GPU"]
    monkeypatch.setattr("benchmarks.attention_counters.which", lambda _: None)
    monkeypatch.setattr("benchmarks.decode_attention.find_spec", lambda _: None)
    assert decode_attention.main(["--counters", "fp8"]) == 4
    assert capsys.readouterr().err.splitlines() == [
        "decode_attention.py lacks here: an NVIDIA GPU; Triton; ncu is not on PATH: install Nsight Compute, which comes with "
        "NVIDIA's CUDA toolkit"
    ]
