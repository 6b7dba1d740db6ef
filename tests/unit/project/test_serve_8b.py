"""docs/serve-8b.md: its commands compose, and its figures are the output of the commands, as far as no GPU is needed."""

import json
import re
import shlex
from pathlib import Path

import pytest
from checkpoints import LLAMA_8B

from pipeline.chain.dry import foretell
from pipeline.chain.planning import show_capacity
from pipeline.config.compose import plan
from stages.evaluate.inputs.samples import read_jsonl
from stages.evaluate.measured_once import limited_to_samples
from stages.verdict.gates.evaluation import too_few
from stages.verdict.thresholds import Thresholds
from stages.workloads.config import StressTestConfig

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "serve-8b.md").read_text(encoding="utf-8")
CAPACITY, DRY, JUDGE = (shlex.split(line)[1:] for line in re.findall(r"^kvgate .*$", PAGE, re.MULTILINE))


@pytest.fixture
def here(tmp_path: Path) -> list[str]:
    """Replace the page's model by its config.json, in a new work directory."""
    model = tmp_path / "Llama-3.1-8B"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(LLAMA_8B))
    return [f"model.path={model}", f"workdir={tmp_path}/work"]


def test_the_pages_memory_is_the_output_of_its_command(here: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    show_capacity(plan([*CAPACITY, *here], multirun=False).jobs[0])
    printed = capsys.readouterr().out
    for line in re.findall(r"^(?:fp8: a request|80 GiB).*$", PAGE, re.MULTILINE):
        assert line in printed


def test_the_pages_judged_engine_holds_what_the_page_claims(here: list[str]) -> None:
    job = plan([*JUDGE, *here], multirun=False).jobs[0]
    assert plan([*DRY, *here], multirun=False).jobs[0].model_copy(update={"dry": False}) == job
    assert job.backend.context_limit == job.workloads.lengths[0] == 16384
    arguments = job.backend.model_dump()
    assert arguments["kv_cache_gib"] >= 2 * arguments["max_num_seqs"], "GiB of the FP16 baseline"
    assert job.workloads.length_documents * 7 == 105


def test_the_dry_run_ends_at_the_missing_weights_in_one_line(here: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert foretell(plan([*DRY, *here], multirun=False)) == 2
    assert "no weights, model.safetensors is missing" in capsys.readouterr().err


def test_the_examples_60_questions_can_pass_and_20_of_them_cannot() -> None:
    samples = read_jsonl(ROOT / "examples" / "support_tickets.jsonl", set())
    assert len(samples) == 60
    assert too_few(samples, Thresholds()) is None
    assert too_few(samples[:20], Thresholds()) == "cannot pass: 20 of 60 questions; ask 60, better 300"


@pytest.mark.parametrize(("longest", "bound"), [(20, 128), (400, 832), (448, 896), (16_384, 2048)])
def test_the_stress_test_is_no_longer_than_twice_the_longest_question(longest: int, bound: int) -> None:
    assert limited_to_samples(StressTestConfig(), longest).max_tokens == bound
