"""benchmarks/decode_attention.py but for its times: cases, bytes, targets, the table, and that a wrong kernel is found out."""

import dataclasses
import json
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import attention_cases
import attention_kernels
import attention_timing
import decode_attention
from attention_cases import Case, Row

torch.set_num_threads(1)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOY = Case(batch=2, tokens=70, group=4, kv_heads=1)
COPY = 4e12
NAMES = [kernel.name for kernel in attention_kernels.KERNELS]


def in_ten_microseconds(run: Any, runs: int | None) -> float:  # noqa: ARG001  (the timer's signature)
    """A timer that times nothing, but runs what it should."""
    assert isinstance(run(), Tensor)
    return 10.0


def toy(kernels: Any = attention_kernels.KERNELS) -> list[Row]:
    with torch.inference_mode():
        return attention_timing.run_case(TOY, kernels, in_ten_microseconds, attention_timing.Place(DEVICE, COPY), seed=1)


def test_the_grid_is_what_the_issue_asks_for() -> None:
    cases = list(attention_cases.grid())
    assert len(cases) == len(set(cases)) == 32
    assert {case.batch for case in cases} == {1, 8, 32, 64}
    assert {case.tokens for case in cases} == {2048, 8192, 32768, 131072}
    assert {(case.group, case.kv_heads, case.head_dim) for case in cases} == {(4, 8, 128), (8, 8, 128)}


def test_bytes_are_those_of_the_roofline() -> None:
    case = Case(batch=32, tokens=8192, group=8)
    tokens = 32 * 8192 * 8
    assert {name: case.kv_bytes(name) // tokens for name in attention_cases.STORAGES} == {
        "fp8k_int4v": 128 + 64 + 4,
        "fp8": 256,
        "bf16": 512,
    }
    queries_and_outputs, new, table = 2 * 32 * 64 * 128 * 2, 2 * 32 * 8 * 128 * 2, 4 * 32 * 129
    assert case.moved_bytes("fp8") == 256 * tokens + queries_and_outputs + new + table
    row = attention_cases.measured(case, "fp8", 1000.0, COPY)
    assert row["gb_per_s"] == pytest.approx(case.moved_bytes("fp8") / 1e6)
    assert row["share_of_copy"] == pytest.approx(row["gb_per_s"] / 4000)
    assert Case(batch=1, tokens=65, group=4).allocated_bytes("bf16") == 128 * 8 * 512


def a_row(kernel: str, storage: str, microseconds: float, correct: bool = True, tokens: int = 8192) -> Row:
    case = Case(batch=32, tokens=tokens, group=8)
    measured = attention_cases.measured(case, storage, microseconds, COPY)
    return {**case.describe(), "kernel": kernel, "storage": storage, "correct": correct, **measured}


def test_targets_are_met_by_every_large_case_or_missed_and_wrong_peers_are_no_peers() -> None:
    rows = [
        a_row("fp8k_int4v", "fp8k_int4v", 115.0),
        a_row("fp8", "fp8", 150.0),
        a_row("flashinfer fp8", "fp8", 10.0, correct=False),
        a_row("bf16", "bf16", 300.0),
        a_row("sdpa bf16", "bf16", 260.0),
    ]
    attention_cases.add_ratios(rows)
    assert rows[0]["over_best_fp8"] == pytest.approx(150 / 115)
    assert rows[0]["over_best_bf16"] == pytest.approx(260 / 115)
    assert (rows[1]["over_best_fp8"], rows[4]["over_best_bf16"]) == (1, 1)
    assert "over_best_fp8" not in rows[2]
    verdicts = [verdict["verdict"] for verdict in attention_cases.judge(rows)]
    assert verdicts == ["met", "met", "missed"]  # 0.90 of the copy, 1.30 times, 2.26 times
    small = a_row("fp8k_int4v", "fp8k_int4v", 1e6, tokens=1024)
    assert [verdict["cases"] for verdict in attention_cases.judge([*rows, small])] == [1, 1, 1]
    assert [verdict["verdict"] for verdict in attention_cases.judge([small])] == ["not measured"] * 3
    wrong = [{**rows[0], "correct": False}]
    assert [verdict["verdict"] for verdict in attention_cases.judge(wrong)] == ["missed"] * 3


def test_every_kernel_has_a_row_and_is_right_or_says_why_it_did_not_run(tmp_path: Path) -> None:
    rows = toy()
    assert sorted(row["kernel"] for row in rows) == sorted(NAMES)
    for row in rows:
        if "skipped" in row:
            assert row["skipped"] == "flashinfer is not installed"
            continue
        assert row["correct"], row
        assert 0 < row["relative_error"] < 1e-2
        assert row["microseconds"] == 10.0
        assert row["chosen"] in [{k: v for k, v in tried.items() if k != "microseconds"} for tried in row["tried"]]
    described = {"name": "a GPU"}
    file = tmp_path / "results.json"
    decode_attention.write_json(file, decode_attention.content(rows, described, COPY))
    content = json.loads(file.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert {"date", "versions", "commit", "command", "gpu", "copy_gb_per_s", "timing", "targets", "results"} <= content.keys()
    assert {"torch", "triton", "flashinfer-python"} <= content["versions"].keys()
    assert content["copy_gb_per_s"] == 4000
    out = StringIO()
    Console(file=out, width=200).print(attention_cases.table(rows))
    assert all(name in out.getvalue() for name in NAMES)


def test_a_kernel_that_is_wrong_for_the_last_sequence_is_found_out() -> None:
    ours = attention_kernels.KERNELS[0]

    def spoiled(step: Any) -> Any:
        for candidate in ours.candidates(step):

            def run(right: Any = candidate.run) -> Tensor:
                out: Tensor = right()
                out[-1, -1] *= 1.1
                return out

            yield dataclasses.replace(candidate, run=run)

    (row,) = toy([dataclasses.replace(ours, candidates=spoiled)])
    assert not row["correct"]
    assert row["relative_error"] > ours.tolerance
    out = StringIO()
    Console(file=out, width=200).print(attention_cases.table([row]))
    assert "WRONG" in out.getvalue()


def test_inputs_are_new_in_every_case_and_pages_lie_in_random_order() -> None:
    one, two = (attention_kernels.Step(TOY, "fp8k_int4v", DEVICE, seed) for seed in (1, 2))
    assert not torch.equal(one.query, two.query)
    assert not torch.equal(one.cache["value_pool"], two.cache["value_pool"])
    pages = attention_kernels.Step(Case(8, 256, 4, 1), "fp8", DEVICE, 3).page_table
    assert sorted(pages.flatten().tolist()) == list(range(32)) != pages.flatten().tolist()


def test_without_a_gpu_it_says_so_in_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert decode_attention.main([]) == 4
    assert capsys.readouterr().err.splitlines() == [
        "decode_attention.py needs an NVIDIA GPU and Triton, and there are not both here"
    ]
