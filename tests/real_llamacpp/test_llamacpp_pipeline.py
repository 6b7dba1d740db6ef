"""`python -m pipeline backend=llamacpp` on llama.cpp, from a GGUF to a verdict."""

from pathlib import Path

import pytest
from helpers.commands.jobs import SHORT, configured, judge
from helpers.verdicts.reports import lines

from stages.engines.llamacpp import backend, engine
from stages.verdict.report import load_report

KV = "llamacpp_q8k_q4v"
FEW = (
    *SHORT,
    "backend=llamacpp",
    f"kv={KV}",
    "backend.n_ctx=2048",
    "backend.n_seq_max=4",
    "backend.threads=1",
)
CHAT = (
    "model=smollm2",
    "calibration=chat",
    "workloads=chat",
    "workloads.samples={documentation: 1, lookup: 1, extraction: 0, quotation: 0, recall: 0}",
)


@pytest.fixture(scope="module")
def gguf_work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gguf") / "work"


def test_the_cache_of_a_gguf_conforms_to_its_policy(gguf_work: Path, llamacpp_python: str) -> None:
    """Judge on two questions, which cannot give a PASS."""
    job = configured(gguf_work, f"backend.python={llamacpp_python}", *FEW, *CHAT)
    directory, _ = judge(job, "is not decided: INCONCLUSIVE")
    report = load_report(directory)
    for line, policy in zip(lines("conformance", report), ("fp16", KV), strict=True):
        assert line.status == "PASS", line.reason
        assert f"computes {policy} as the reference engine does" in line.reason
    assert [line.status for line in lines("must_fail_control", report)] == ["PASS"]
    for free in (report.tests.free_answers, report.baseline_tests.free_answers):
        assert free.contradictions == []
    assert report.system.kib_per_token_allocated == report.system.kib_per_token


def test_a_rotation_that_the_policy_has_and_the_engine_lacks_fails(
    gguf_work: Path, llamacpp_python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "open_context", lambda *given: backend.open_context(*(*given[:-1], False)))
    job = configured(gguf_work, f"backend.python={llamacpp_python}", *FEW, *CHAT, "kv.name=rotated")
    directory, _ = judge(job, "does not compute its policy: FAIL")
    failed = [line.reason for line in lines("conformance", load_report(directory)) if line.status == "FAIL"]
    assert len(failed) == 1
    assert "does not compute rotated" in failed[0]
