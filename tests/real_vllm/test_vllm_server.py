"""`python -m pipeline backend=openai` on vLLM's own server with the tiny model: what it shows and refuses."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from processes import await_up, free_port
from short_evaluations import THREE, job_of, judge

from pipeline.core.errors import UserError
from pipeline.run.inputs import check_inputs
from pipeline.run.runner import run
from pipeline.verdict.gates import Gates, decide
from pipeline.verdict.report import load_report, load_rows

FEW = ("backend=openai", "kv=fp8_uncalibrated", "tracking=none", "workloads=builtin", THREE, "workloads.rounds=[1.0]",
       "backend.timeout_s=300")  # fmt: skip
"""The first answer takes a minute here."""


@contextmanager
def vllm_server(python: str, checkpoint: Path, log: Path, *arguments: str) -> Iterator[str]:
    """Serve a checkpoint on a free port; gives the url. The server is gone with its children when the block ends.

    The console script `vllm` asks for a distribution of that name, which the CPU build does not have; its module does not.
    """
    port = free_port()
    command = [
        python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(checkpoint), "--served-model-name", "tiny",
        "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", "2048", "--enforce-eager",
        "--block-size", "32", "--max-num-seqs", "4", "--enable-prompt-tokens-details", *arguments,
    ]  # fmt: skip
    quiet = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    alone = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_PLUGINS": ""}
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env={**inherited, **quiet, **alone}, start_new_session=True
        )  # fmt: skip
    try:
        await_up(f"http://127.0.0.1:{port}", process, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path, vllm_python: str) -> Iterator[tuple[str, ...]]:
    """As keys of the command line."""
    logs = tmp_path_factory.mktemp("logs")
    with (
        vllm_server(vllm_python, tiny_checkpoint, logs / "baseline") as baseline,
        vllm_server(vllm_python, tiny_checkpoint, logs / "fp8", "--kv-cache-dtype", "fp8") as candidate,
    ):
        yield f"backend.url={candidate}", f"backend.baseline_url={baseline}"


def test_a_server_is_judged_by_what_it_shows_of_its_prefix_cache(tmp_path: Path, servers: tuple[str, ...]) -> None:
    directory, _ = judge(job_of(tmp_path / "work", *FEW, *servers), "fp8_uncalibrated is not decided: INCONCLUSIVE")
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
    assert report.probes.free_candidate.contradictions == report.probes.free_baseline.contradictions == []
    assert report.system.decode_tokens_per_s is None or report.system.decode_tokens_per_s > 0
    verdict = decide(report, rows, Gates())
    assert verdict.reasons[0].startswith("candidate: only reuse over a prefix cache was seen, the decode kernel was not")


def test_more_log_probabilities_than_the_server_shows_are_refused_in_a_line(tmp_path: Path, servers: tuple[str, ...]) -> None:
    job = job_of(tmp_path / "work", *FEW, *servers, "backend.top_logprobs=30")

    def command() -> None:
        check_inputs(job)
        run(job, "sweep")

    expected = r"backend\.top_logprobs=30 \(400: Requested sample logprobs of 30, which is greater than max"
    with pytest.raises(UserError, match=expected) as raised:
        command()
    assert "\n" not in str(raised.value)
