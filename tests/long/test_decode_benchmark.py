"""benchmarks/decode_attention.py without its times: cases, targets, the table, and the detection of wrong outputs."""

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

from benchmarks import attention_cases, attention_peers, attention_step, attention_timing, decode_attention
from benchmarks.attention_cases import Case, Row
from benchmarks.recording import write_json

torch.set_num_threads(1)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOY = Case(batch=2, tokens=70, group=4, kv_heads=1)
COPY = 4e12
KERNELS = {kernel.name: kernel for kernel in attention_peers.KERNELS}


def toy(*kernels: Any) -> list[Row]:
    """Run kernels once each, in ten microseconds."""
    target = attention_timing.MeasuredDevice(DEVICE, COPY)
    with torch.inference_mode():
        return attention_timing.run_case(TOY, kernels, lambda run, _: (10.0, run()), target, seed=1)


def a_row(kernel: str, microseconds: float, *, correct: bool = True, tokens: int = 8192, ragged: str = "") -> Row:
    case = Case(batch=32, tokens=tokens, group=8, ragged=attention_cases.RAGGED.get(ragged, ()))
    known = KERNELS[kernel]
    measured = attention_cases.measured(case, known.storage, microseconds, COPY)
    named = {"kernel": kernel, "storage": known.storage, "peer": known.peer, "chosen": "", "relative_error": 1e-3}
    return {**case.describe(), **named, "correct": correct, **measured}


def verdicts(*rows: Row) -> list[str]:
    attention_cases.add_ratios(list(rows))
    return [verdict["verdict"] for verdict in attention_cases.judge(rows)]


FAST = {"fp8k_int4v": 110.0, "flashinfer xqa fp8": 140.0, "flashinfer bf16": 270.0}
"""A run that meets every target: 94 % of the copy, 1.27 and 2.45 times."""


@pytest.mark.parametrize(
    ("changed", "expected", "code"),
    [
        ({}, ["met", "met", "met"], 0),
        ({"fp8k_int4v": 125.0}, ["missed", "missed", "missed"], 3),
        ({"fp8k_int4v": float("nan")}, ["missed", "missed", "missed"], 3),
        ({"flashinfer xqa fp8": None}, ["met", "not measured", "met"], 0),
        ({"fp8": 10.0}, ["met", "met", "met"], 0),
        ({"fp8k_int4v": None}, ["not measured"] * 3, 0),
    ],
    ids=["met", "slow", "no number", "no peer", "kvgate's own is no peer", "absent"],
)
def test_targets_are_judged_beside_the_fastest_peer_alone(
    changed: dict[str, Any], expected: list[str], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [a_row(kernel, time) for kernel, time in (FAST | changed).items() if time is not None]
    assert verdicts(*rows) == expected
    assert decode_attention.report(rows) == code
    out = capsys.readouterr().out
    assert all(f"{verdict}: fp8k_int4v" in out for verdict in expected)


def test_a_wrong_output_misses_every_target_and_a_wrong_peer_is_none() -> None:
    rows = [a_row(kernel, time) for kernel, time in FAST.items()]
    assert verdicts(*rows, a_row("flashinfer fp8", 1.0, correct=False)) == ["met"] * 3
    assert verdicts(rows[0] | {"correct": False}, *rows[1:]) == ["missed"] * 3
    assert attention_cases.exit_code([rows[0] | {"correct": False}]) == 1


def test_small_cases_are_not_judged_unless_they_are_ragged() -> None:
    assert verdicts(a_row("fp8k_int4v", 1e6, tokens=1024)) == ["not measured"] * 3
    ragged = a_row("fp8k_int4v", 1e6, tokens=131072, ragged="one long")
    assert ragged["kv_bytes"] < attention_cases.LARGE_BYTES
    assert verdicts(ragged)[0] == "missed"


def test_every_kernel_has_a_row_and_is_right_or_says_why_it_did_not_run(tmp_path: Path) -> None:
    rows = toy(*KERNELS.values())
    assert sorted(row["kernel"] for row in rows) == sorted(KERNELS)
    for row in rows:
        if "skipped" in row:
            assert row["skipped"] == f"{row['kernel'].split()[0]} is not installed"
            continue
        assert row["correct"], row
        assert 0 < row["relative_error"] < 1e-2
        assert row["chosen"] in row["tried"]
    file = tmp_path / "results.json"
    write_json(file, decode_attention.content(rows, {"name": "a GPU"}, COPY))
    content = json.loads(file.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert {"versions", "commit", "gpu", "copy_gb_per_s", "targets", "exit_code", "results"} <= content.keys()
    assert all(name in shown(rows) for name in KERNELS)


def shown(rows: list[Row]) -> str:
    out = StringIO()
    Console(file=out, width=200).print(attention_cases.table(rows))
    return out.getvalue()


def with_ways(kernel: Any, *prepared: Any) -> Any:
    """Return the kernel with other, numbered candidates. An exception in place of one is raised when it is prepared; a
    function that raises fails when it runs."""

    def candidates(_: Any) -> Any:
        def give(way: Any) -> Any:
            if isinstance(way, Exception):
                raise way
            return way

        for number, way in enumerate(prepared):
            yield attention_step.Candidate(partial(give, way), f"way {number}")

    return dataclasses.replace(kernel, candidates=candidates)


def test_a_kernel_that_is_wrong_for_the_last_sequence_is_found_out() -> None:
    shipped = KERNELS["fp8k_int4v"]

    def spoiled(step: Any) -> Any:
        (candidate,) = shipped.candidates(step)
        run = candidate.prepare()
        yield dataclasses.replace(candidate, prepare=lambda: lambda: spoil(run()))

    def spoil(out: Tensor) -> Tensor:
        out[-1, -1] *= 1.1
        return out

    (row,) = toy(dataclasses.replace(shipped, candidates=spoiled))
    assert not row["correct"]
    assert row["relative_error"] > shipped.tolerance
    assert "WRONG" in shown([row])


def fails() -> Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 64 GiB")


def test_a_peer_that_fails_is_left_out_with_its_reason_and_its_other_ways_still_count() -> None:
    def in_the_generator(_: Any) -> Any:
        raise RuntimeError("Could not find nvcc")
        yield

    sdpa, shipped = KERNELS["sdpa bf16"], KERNELS["bf16"]
    zeros = torch.zeros(TOY.batch, TOY.q_heads, TOY.head_dim, device=DEVICE)
    unprepared = with_ways(sdpa, RuntimeError("Could not find nvcc"), lambda: zeros)
    rows = toy(dataclasses.replace(sdpa, candidates=in_the_generator), with_ways(sdpa, fails), unprepared, shipped)
    assert rows[0]["skipped"] == "failed: RuntimeError: Could not find nvcc"
    assert rows[1]["skipped"] == "failed: way 0 OutOfMemoryError: CUDA out of memory."
    assert (rows[2]["failed"], rows[2]["chosen"]) == (["way 0 RuntimeError: Could not find nvcc"], "way 1")
    assert not rows[2]["correct"]
    assert rows[3]["correct"]
    with pytest.raises(torch.OutOfMemoryError):
        toy(with_ways(shipped, fails))


def test_without_a_gpu_it_says_so_in_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("benchmarks.decode_attention.find_spec", lambda _: None)
    assert decode_attention.main([]) == 4
    assert capsys.readouterr().err.splitlines() == ["decode_attention.py lacks here: an NVIDIA GPU; Triton"]
