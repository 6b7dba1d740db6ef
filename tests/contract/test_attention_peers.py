"""The GPU benchmark's calls of FlashInfer and vLLM, bound to their recorded signatures and run over what they mean."""

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import fake_attention_peers as peers
import pytest
import torch
from torch import Tensor

from benchmarks.attention_cases import Case, Row
from benchmarks.attention_kernels import KERNELS
from benchmarks.attention_timing import MeasuredDevice, run_case

torch.set_num_threads(1)

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
PEERS = [kernel for kernel in KERNELS if kernel.library in ("flashinfer", "vllm")]
CASES = {
    "one length": Case(batch=3, tokens=70, group=4, kv_heads=2),
    "ragged": Case(batch=3, tokens=200, group=8, kv_heads=2, ragged=(200, 1, 64)),
}


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    peers.install(monkeypatch)


def ten_microseconds(run: Any, _: int | None) -> tuple[float, Tensor]:
    return 10.0, run()


def rows_of(case: Case, kernels: Any) -> list[Row]:
    with torch.inference_mode():
        return run_case(case, kernels, ten_microseconds, MeasuredDevice(CPU, 4e12), seed=3)


@pytest.mark.parametrize("name", CASES)
def test_every_peer_attends_to_the_right_tokens_by_calls_that_its_library_takes(name: str) -> None:
    rows = rows_of(CASES[name], PEERS)
    assert {row["kernel"] for row in rows} == {kernel.name for kernel in PEERS}
    for row in rows:
        assert row["correct"], row
        assert row["failed"] == []
        assert row["peer"]


def test_the_fastest_fp8_and_bf16_peers_of_each_library_are_compared_with() -> None:
    by_storage: dict[str, set[str]] = {}
    for kernel in KERNELS:
        if kernel.library is not None:
            by_storage.setdefault(kernel.storage, set()).add(kernel.library)
    assert by_storage == {"fp8": {"flashinfer", "vllm"}, "bf16": {"flashinfer", "vllm", "torch"}, "fp8k_int4v": {"vllm"}}


def test_sequences_of_different_lengths_are_not_given_to_a_kernel_of_one_length() -> None:
    sdpa = next(kernel for kernel in KERNELS if kernel.name == "sdpa bf16")
    (row,) = rows_of(CASES["ragged"], [sdpa])
    assert row["skipped"] == "takes sequences of one length only"


def test_a_call_that_a_library_does_not_take_is_a_failure_of_that_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    older = dict(peers.SIGNATURES["flashinfer"]["signatures"])
    older["BatchDecodeWithPagedKVCacheWrapper.__init__"] = "self, workspace, kv_layout='NHD', use_tensor_cores=False"
    monkeypatch.setitem(peers.SIGNATURES["flashinfer"], "signatures", older)
    (row,) = rows_of(CASES["one length"], [kernel for kernel in PEERS if kernel.name == "flashinfer bf16"])
    assert "unexpected keyword argument 'backend'" in row["skipped"]


@pytest.mark.parametrize("fault", ["length", "page"])
def test_a_peer_that_is_given_other_tokens_is_wrong(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = peers.trtllm_batch_decode

    def wrong(query: Tensor, pools: Any, workspace: Tensor, table: Tensor, lengths: Tensor, *rest: Any, **named: Any) -> Tensor:
        if fault == "length":
            return right(query, pools, workspace, table, (lengths.int() - 8).to(torch.uint32), *rest, **named)
        return right(query, pools, workspace, table.flip(0), lengths, *rest, **named)

    monkeypatch.setattr(sys.modules["flashinfer.decode"], "trtllm_batch_decode_with_kv_cache", wrong)
    kernel = next(kernel for kernel in PEERS if kernel.name == "flashinfer xqa bf16")
    (row,) = rows_of(CASES["one length"], [kernel])
    assert not row["correct"]


@pytest.mark.parametrize("library", ["flashinfer", "vllm"])
def test_recorded_signatures_are_those_of_an_installed_library(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the stand-ins
    found = [path.parents[1] for path in ROOT.glob(f".venv*/lib/python*/site-packages/{library}/__init__.py")]
    spec = find_spec(library)
    if spec is not None and spec.origin is not None:
        found.append(Path(spec.origin).parents[1])
    if not found:
        pytest.skip(f"{library} is installed neither here nor in a .venv of this checkout")
    recorded = peers.SIGNATURES[library]
    for name, file in recorded["sources"].items():
        source = (found[0] / file).read_text(encoding="utf-8")
        assert peers.recorded_parameters(source, name) == recorded["signatures"][name], name
