"""`python -m pipeline backend=llamacpp` on llama.cpp, from a GGUF to a verdict."""

from pathlib import Path

import pytest
from helpers.checkpoints.gguf_files import write_checkpoint
from helpers.commands.jobs import SHORT, configured, judge
from helpers.verdicts.reports import lines

from stages.engines.llamacpp import backend, engine
from stages.verdict.report import load_report, load_rows

KV = "llamacpp_q8k_q4v"
FEW = (
    *SHORT,
    "backend=llamacpp",
    f"kv={KV}",
    "backend.n_ctx=512",
    "backend.n_seq_max=4",
    "backend.threads=1",
    "calibration.max_length=64",
    "workloads.samples={prose: 1, retrieval: 0, copy: 1, tool_call: 0, multi_turn: 0}",
    "gates.min_baseline_probability=0",  # the model's own tokenizer splits numbers in another way
)


def test_a_sound_cache_conforms_and_one_without_rotation_fails(
    tmp_path: Path, tiny_checkpoint: Path, llamacpp_python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Judge on two questions, which cannot give a PASS."""
    gguf = write_checkpoint(tmp_path / "model.gguf", tiny_checkpoint, "Q4_1")
    overrides = (f"backend.python={llamacpp_python}", *FEW, f"model.path={gguf}")
    directory, _ = judge(configured(tmp_path / "work", *overrides), "is not decided: INCONCLUSIVE")
    report = load_report(directory)
    assert sum(row.judged for row in load_rows(directory)) == 1
    for line, policy in zip(lines("conformance", report), ("fp16", KV), strict=True):
        assert line.status == "PASS", line.reason
        assert f"computes {policy} as the reference engine does" in line.reason
    assert [line.status for line in lines("must_fail_control", report)] == ["PASS"]
    for free in (report.tests.free_answers, report.baseline_tests.free_answers):
        assert free.contradictions == []

    monkeypatch.setattr(engine, "open_context", lambda *arguments: backend.open_context(*(*arguments[:-1], False)))
    directory, _ = judge(configured(tmp_path / "work", *overrides, "kv.name=rotated"), "does not compute its policy: FAIL")
    failed = [line.reason for line in lines("conformance", load_report(directory)) if line.status == "FAIL"]
    assert len(failed) == 1
    assert "does not compute rotated" in failed[0]
