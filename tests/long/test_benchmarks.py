"""The benchmarks run and write the fields of their results files. No test asserts a speed."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from optimum.quanto.library.extensions import cpp

from benchmarks import cpu_attention, forced_decode, long_context, peers

RATES = ("forward", "oracle", "engine", "dynamic", "quanto", "hqq")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack codes as quanto::unpack does, in plain torch."""
    return torch.cat([(packed >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)])


def test_forced_decode_reports_every_contender_ratios_against_the_fastest_quantized_cache_and_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Quanto would first compile its unpacking, which needs a C++ compiler and a minute.
    monkeypatch.setattr(cpp.ext, "_lib", SimpleNamespace(unpack=unpack))
    file = tmp_path / "results.json"
    small = ["--contexts", "128", "--batch", "2", "--rounds", "1", "--slope-contexts", "64,128,192"]
    forced_decode.main(["--json", str(file), *small, "--policies", "int4_g64,fp8"])
    content = json.loads(file.read_text())
    assert {"date", "machine", "versions", "command", "results", "slope", "bytes_per_token"} <= content.keys()
    cases = [(row["context"], row["batch"], row["policy"]) for row in content["results"]]
    assert cases == [(128, 2, policy) for policy in ("int4_g64", "fp8")]
    for row in content["results"]:
        assert all(row[f"{name}_tokens_per_s"] > 0 for name in RATES)
        best = max(row["quanto_tokens_per_s"], row["hqq_tokens_per_s"])
        assert row["oracle_ratio"] == pytest.approx(row["oracle_tokens_per_s"] / best)
        assert row["engine_ratio"] == pytest.approx(row["engine_tokens_per_s"] / best)
        assert row["scored_tokens"] == row["context"] * row["batch"]
    slope = content["slope"]["int4_g64"]
    assert len(slope["step_us"]) == 3
    assert slope["r_squared"] <= 1
    bytes_per_token = content["bytes_per_token"]
    assert bytes_per_token["int4_g64"] == 4 * 2 * 2 * (32 + 2)  # layers, heads, sides; codes and one float16 scale
    for name in peers.QUANTIZED:
        assert bytes_per_token[name]["codes"] == 4 * 2 * 2 * 32
        assert bytes_per_token["int4_g64"] <= bytes_per_token[name]["float16_parameters"] <= bytes_per_token[name]["allocated"]


def a_run(peak_rss_gib: float) -> dict[str, Any]:
    return {"peak_rss_gib": peak_rss_gib, "prefill_s": 1.0, "decode_s": 1.0}


@pytest.mark.parametrize(("peak", "code"), [(7.9, 0), (8.1, 3)])
def test_long_context_fails_when_an_engine_takes_more_than_the_limit(
    peak: float, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = iter([a_run(1.0), a_run(peak)])
    monkeypatch.setattr(long_context, "run_in_subprocess", lambda *_: next(runs))
    file = tmp_path / "results.json"
    assert long_context.main(["--json", str(file), "--policies", "int4_g64"]) == code
    assert [row["within_limit"] for row in json.loads(file.read_text())["results"]] == [True, code == 0]


@pytest.mark.parametrize("engine", long_context.ENGINES)
def test_long_context_measures_time_cache_and_peak_memory(engine: str) -> None:
    result = long_context.run_one(engine, "int4_g64", tokens=150, steps=2)
    assert result["cache_mib"] >= 152 * 544 / 2**20
    assert result["peak_rss_gib"] >= result["loaded_rss_gib"] > 0
    assert result["prefill_s"] > 0
    assert result["decode_s"] > 0


def test_cpu_attention_compares_each_policy_with_the_fastest_peer_of_its_bits_in_one_run(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    small = ["--contexts", "128", "--rounds", "2", "--policies", "fp16,fp8k_int4v,int4_sinks"]
    cpu_attention.main(["--json", str(file), *small])
    rows = json.loads(file.read_text())["results"]
    times = {(row["kind"], row["name"]): row for row in rows}
    assert {kind for kind, _ in times} == {"kernel", "body", "copy", "peer"}
    assert times["peer", "INT4 tensor"]["cache_bytes"] == 128 * 2 * 2 * 32
    assert times["kernel", "fp8k_int4v"]["cache_bytes"] == 128 * 2 * (64 + 32 + 2)
    peers = {"fp16": {"float32"}, "fp8k_int4v": {"INT8 tensor", "INT8 channel", "INT4 tensor", "INT4 channel"},
             "int4_sinks": {"INT4 tensor", "INT4 channel"}}  # fmt: skip
    for policy, allowed in peers.items():
        row = times["kernel", policy]
        fastest = min(times["peer", name]["cold_us"] for name in allowed)
        assert row["cold_peer"] in allowed
        assert row["cold_over_peer"] == pytest.approx(row["cold_us"] / fastest)
        assert row["warm_over_body"] == pytest.approx(row["warm_us"] / times["body", policy]["warm_us"])
