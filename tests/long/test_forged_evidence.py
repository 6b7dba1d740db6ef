"""The rows of a sound cache in the evaluation of a broken one, with every digest made to fit: who refuses it, and by what."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from signing_keys import key_pair

from pipeline.artifacts.digest import tree_files

FEW = [
    "workloads.samples={prose: 4, retrieval: 24, tool_call: 24, copy: 24, multi_turn: 24}",
    "workloads.max_scored_tokens=48",
    "workloads.load={batch: 2, context_tokens: 64, new_tokens: 8, warmup_steps: 1, budget_gib: 1.0, sequence_tokens: 1024}",
    "gates.margin=0.45",
    "gates.max_ruined_share=0.1",
    "gates.min_samples=8",
    "calibration.samples=8",
    "backend.threads=1",
]


def pipeline(work: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pipeline", f"workdir={work}", *FEW, *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, cwd=work.parent, timeout=900)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return key_pair(tmp_path_factory.mktemp("keys"), "ours")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory, keys: tuple[Path, Path]) -> Path:
    """A work directory in which fp8 passed and int4_tensor, whose evaluation was forged since, failed."""
    work = tmp_path_factory.mktemp("forged") / "work"
    result = pipeline(work, "-m", "kv=fp8,int4_tensor", f"signing.key={keys[0]}")
    assert result.returncode == 0, result.stderr
    summary = json.loads((work / "summary.json").read_text())
    sound, broken = (Path(one["report"]["path"]).parent for one in summary["candidates"])
    forge(sound, broken)
    result = pipeline(work, "stage=evaluate", "kv=int4_tensor")
    assert result.returncode == 0, result.stderr
    assert "PASS" in result.stdout, "the forged evaluation is reused, and its gates pass"
    return work


def forge(sound: Path, broken: Path) -> None:
    """Give a broken evaluation a sound one's rows and metrics, and a manifest that fits them."""
    report: dict[str, Any] = json.loads((sound / "report.json").read_text())
    own = json.loads((broken / "report.json").read_text())
    kept = ("policy", "engine_digest", "graph_digest", "baseline_digest", "workloads_digest")
    (broken / "report.json").write_text(json.dumps(report | {name: own[name] for name in kept}))
    for name in ("samples.jsonl", "tokens.safetensors"):
        (broken / name).write_bytes((sound / name).read_bytes())
    manifest = json.loads((broken / ".manifest.json").read_text())
    (broken / ".manifest.json").write_text(json.dumps(manifest | {"files": tree_files(broken)}))


def test_without_a_key_the_engines_say_that_the_rows_are_not_theirs(work: Path) -> None:
    result = pipeline(work, "stage=promote")
    assert result.returncode == 3, result.stdout
    assert "int4_tensor is not promoted: samples, decoded again: differs" in result.stderr


def test_with_a_key_it_is_not_signed_or_signed_for_other_files(work: Path, keys: tuple[Path, Path]) -> None:
    trusting = [f"signing.key={keys[0]}", f"signing.trusted=[{keys[1]}]", "promote.decode_again=0"]
    result = pipeline(work, "stage=promote", *trusting)
    assert result.returncode == 3, result.stdout
    assert "int4_tensor is not promoted: signature: differs, it is not signed" in result.stderr
    (forged,) = (
        path.parent
        for path in (work / "artifacts").glob("identity/*/identity.json")
        if not path.with_name("identity.sig").exists()
    )
    result = pipeline(work, "stage=verify", f"bundle={forged}", f"signing.trusted=[{keys[1]}]")
    assert result.returncode == 3
    assert result.stderr.strip().endswith("is not what was judged: signature")
