"""The benchmark of decode attention on a CPU runs and writes the fields of its results file. No test asserts a speed."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import cpu_attention


def test_cpu_attention_compares_each_policy_with_the_fastest_peer_of_its_bits_in_one_run(tmp_path: Path) -> None:
    torch.set_num_threads(1)
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
