"""`python -m pipeline backend=openai` on vLLM's own server with the tiny model: what it shows, and its end in the middle."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from short_evaluations import THREE, job_of, judge
from vllm_server import vllm_server

from pipeline.config.config import Config
from pipeline.core.errors import MissingRequirement, UserError
from pipeline.run.inputs import check_inputs
from pipeline.run.runner import run
from pipeline.verdict.gates import Gates, decide
from pipeline.verdict.report import load_report, load_rows

FEW = ("backend=openai", "kv=fp8_uncalibrated", "tracking=none", "workloads=builtin", THREE, "workloads.rounds=[1.0]",
       "backend.timeout_s=300")  # fmt: skip
"""The first answer takes a minute here."""

Servers = dict[str, tuple[str, int]]
"""Role -> url and process."""


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path, vllm_python: str) -> Iterator[Servers]:
    logs = tmp_path_factory.mktemp("logs")
    with (
        vllm_server(vllm_python, tiny_checkpoint, logs / "baseline") as (baseline, first),
        vllm_server(vllm_python, tiny_checkpoint, logs / "fp8", "--kv-cache-dtype", "fp8") as (candidate, second),
    ):
        yield {"baseline": (baseline, first.pid), "candidate": (candidate, second.pid)}


def judging(work: Path, servers: Servers, *given: str) -> Config:
    urls = [f"backend.url={servers['candidate'][0]}", f"backend.baseline_url={servers['baseline'][0]}"]
    return job_of(work, *FEW, *urls, *given)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("served") / "work"


def test_a_server_is_judged_by_what_it_shows_of_its_prefix_cache(work: Path, servers: Servers) -> None:
    directory, _ = judge(judging(work, servers), "fp8_uncalibrated is not decided: INCONCLUSIVE")
    report, rows = load_report(directory), load_rows(directory)
    served = report.served
    assert served is not None
    assert (served.candidate.release, served.candidate.model) == ("0.32.0", "tiny")
    assert (served.candidate.says["cache_dtype"], served.baseline.says["cache_dtype"]) == ("fp8", "auto")
    assert served.candidate.says["system_fingerprint"] != served.baseline.says["system_fingerprint"]
    assert served.candidate.cached_tokens is not None
    assert served.candidate.cached_tokens > 0.7 * served.candidate.prompt_tokens
    assert served.candidate.shown_mass is not None
    assert served.candidate.shown_mass > 0.9
    fidelity = report.overall.fidelity
    assert fidelity.kl_mean is not None
    assert 1e-7 < fidelity.kl_mean < 0.02, "an FP8 cache is near, and is not, the 16-bit one"
    assert report.probes is not None
    assert report.probes.free_candidate.contradictions == report.probes.free_baseline.contradictions == []
    assert report.system.decode_tokens_per_s is None or report.system.decode_tokens_per_s > 0
    verdict = decide(report, rows, Gates())
    assert verdict.reasons[0].startswith("candidate: only reuse over a prefix cache was seen, the decode kernel was not")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            "backend.top_logprobs=30",
            r"backend\.top_logprobs=30 \(400: Requested sample logprobs of 30, which is greater than max",
        ),
        ("backend.model=other", r"^backend\.model=other: backend\.url=http.* serves tiny"),
        ("model=smollm2", r"its tokenizer is not that of tiny, which backend\..*url=http.* serves"),
    ],
)
def test_what_the_server_refuses_is_told_in_a_line(tmp_path: Path, servers: Servers, given: str, expected: str) -> None:
    job = judging(tmp_path / "work", servers, given)

    def command() -> None:
        check_inputs(job)
        run(job, "sweep")

    with pytest.raises(UserError, match=expected) as raised:
        command()
    assert "\n" not in str(raised.value)


def test_a_server_that_is_killed_in_the_middle_is_told_in_a_line(work: Path, servers: Servers) -> None:
    job = judging(work, servers, "workloads.samples.prose=3")
    check_inputs(job)

    def kill() -> None:
        while not list((work / "artifacts" / ".partial").glob("baseline/*/unfinished/*/*.safetensors")):
            time.sleep(0.02)
        os.killpg(servers["baseline"][1], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(MissingRequirement, match=r"^backend\.baseline_url=http.*: no server answers POST") as raised:
        run(job, "sweep")
    killer.join()
    assert str(raised.value).endswith("what was measured is kept, and the same command goes on")
    assert "\n" not in str(raised.value)
