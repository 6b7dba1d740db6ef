"""Pages of a real `mlflow server` in a real browser, as seen by a user who opens an address that kvgate printed."""

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from browser import chromium_path, complaints, launched
from gate_reports import answered, sliced, verdict
from judged_candidates import judged_candidate
from judged_engine import config_of
from postgres import mlflow_server

from pipeline.chain.showing import compare_in_mlflow
from pipeline.registry.mlflow_store import MlflowStore
from pipeline.registry.tracking import ENVIRONMENT, Tracking, locate
from stages.verdict.candidate import Candidate
from stages.verdict.tracked import flat_metrics

if TYPE_CHECKING:
    from playwright.sync_api import Page

SWEEP = "20260101-sweep"
DELAYED = "ResizeObserver loop completed with undelivered notifications"
"""Error reported by a browser under load. It is harmless: the page only has to wait for its next frame."""
WAIT_MS = 120_000
"""Timeout of a page in milliseconds, long enough for a busy machine."""


@dataclass
class Tracked:
    """A sweep of three candidates on a server. The smallest candidate failed."""

    address: str
    store: MlflowStore
    candidates: list[Candidate]


def judge(folder: Path, store: MlflowStore, name: str, lost: int, memory: float, sweep: str = SWEEP) -> Candidate:
    rows = answered("copy", 64, lost=lost) + answered("tool_call", 64)
    metrics = flat_metrics(sliced(rows)) | {"memory/kib_per_token": memory, "memory/max_live_tokens": 1000 / memory}
    candidate = judged_candidate(folder, name, metrics=metrics)
    candidate = candidate.model_copy(update=Candidate.decided(verdict(rows)) | ({"verdict": "PASS"} if not lost else {}))
    with store.candidate(sweep, name, "onnxruntime", {"kv": {"name": name}}) as run:
        return store.conclude(run, candidate, rows)


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tracked]:
    chromium_path()
    folder = tmp_path_factory.mktemp("pages")
    with mlflow_server(f"sqlite:///{folder}/mlflow.db", folder / "artifacts") as address:
        store = MlflowStore(locate(Tracking(), folder / "work", "tiny", {ENVIRONMENT: address}))
        judge(folder, store, "of another sweep", 0, 1.0, "20250101-before")
        candidates = [judge(folder, store, *one) for one in (("fp8", 0, 1.0), ("int8", 0, 1.03), ("int4", 40, 0.5))]
        yield Tracked(address, store, candidates)
        shutil.rmtree(folder / "artifacts", ignore_errors=True)


@pytest.fixture(scope="module")
def page() -> Iterator["Page"]:
    with launched() as browser:
        page = browser.new_page(viewport={"width": 1600, "height": 1000})
        page.set_default_timeout(WAIT_MS)
        yield page


def text_of(page: "Page", address: str, sign: str) -> str:
    """Open a page, wait until it shows `sign`, and return its text. Its scripts must not report errors."""
    errors = complaints(page, "error")
    page.goto("about:blank")  # changing only the part after # would not reload the page
    page.goto(address)
    page.get_by_text(sign).first.wait_for()
    # A server without accounts has no current user and responds with 404.
    assert [error for error in errors if not error.endswith("/users/current") and DELAYED not in error] == []
    return page.inner_text("body")


def printed_address(tracked: Tracked, candidates: list[Candidate], capsys: pytest.CaptureFixture[str]) -> str:
    config = config_of(f"workdir={tracked.store.lock.parent}", f"tracking.uri={tracked.address}")
    compare_in_mlflow(config, candidates, SWEEP)
    (address,) = re.findall(r"http\S+", capsys.readouterr().out)
    assert address.startswith(tracked.address)
    return str(address)


def test_the_printed_comparison_shows_the_sweeps_runs_and_draws_their_recovery(
    tracked: Tracked, page: "Page", capsys: pytest.CaptureFixture[str]
) -> None:
    text = text_of(page, printed_address(tracked, tracked.candidates, capsys), "quality/recovery")
    for name in ("fp8: PASS", "int8: PASS", "int4: FAIL", "fp16: baseline"):
        page.get_by_role("link", name=name, exact=True).wait_for()
    assert "of another sweep" not in text
