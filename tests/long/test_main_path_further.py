"""More of the whole path on the trained tiny model: the reference backend's verdicts, Ctrl-C, a champion, forged rows."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from helpers.commands.tiny_model import FEW, Swept, pipeline, summary
from helpers.registry.signing_keys import key_pair

from pipeline.evidence.identity import IDENTITY_FILE, read_identity
from pipeline.registry.signing import SIGNATURE_FILE
from stages.core.digest import tree_files


@pytest.fixture(scope="module")
def promoted(swept: Swept) -> Swept:
    """A sweep whose best engine is the champion."""
    result = pipeline(swept[0], "stage=promote")
    assert result.returncode == 0, result.stderr
    return swept


USE = [
    "stage=recommend",
    "capacity.gpu_gib=1",
    "capacity.reserve_gib=0",
    "capacity.contexts=[{tokens: 320, requests: 1}]",
    "capacity.new_tokens=32",
]


def test_the_evidence_of_a_sweep_is_recommended_for_a_use_that_it_covers(promoted: Swept) -> None:
    result = pipeline(promoted[0], *USE)
    assert result.returncode == 0, result.stderr
    assert "/artifacts/identity/" in result.stdout


def test_control_c_finishes_work_in_flight_and_the_same_command_resumes(swept: Swept, tmp_path: Path) -> None:
    artifacts = swept[0] / "artifacts"
    # A separate directory keeps the sweep's summary. Artifacts that do not depend on samples are shared.
    work = tmp_path / "work"
    work.mkdir()
    (work / "artifacts").symlink_to(artifacts)
    arguments = ["stage=evaluate", "kv=fp8", "tracking=none", "workloads.samples.copy=60", "workloads.rounds=[1.0]"]
    command = [sys.executable, "-m", "pipeline", f"workdir={work}", *FEW, *arguments]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 400
        while not list(artifacts.glob(".partial/baseline/*/unfinished/*/*.safetensors")):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGSTOP)
        before = sorted(artifacts.rglob("*"))
        refused = pipeline(work, "stage=prune", "tracking=none", "prune.keep_sweeps=0", "prune.apply=true")
        assert refused.returncode == 4, refused.stdout
        assert f"used by process {process.pid} on " in refused.stderr
        assert sorted(artifacts.rglob("*")) == before, "nothing that a running job may use is removed"
        process.send_signal(signal.SIGCONT)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=400)
    finally:
        process.kill()
    assert process.returncode == 130, errors
    assert summary(work)["exit_code"] == 130
    left = list(artifacts.glob(".partial/baseline/*/unfinished/*/*.safetensors"))
    assert 0 < len(left) < 94
    assert pipeline(work, *arguments).returncode == 0
    assert not list(artifacts.glob(".partial/*/*"))


def test_the_reference_engine_is_judged_and_promoted_like_the_onnx_engine(swept: Swept) -> None:
    work, _ = swept
    by_engine = {c["policy"]: c for c in summary(work)["candidates"]}
    result = pipeline(work, "-m", "kv=fp8,int4_tensor", "backend=torch", "backend.device=cpu", "workloads.batch_size=2")
    assert result.returncode == 0, result.stderr
    by_reference = {c["policy"]: c for c in summary(work)["candidates"]}
    for kv, candidate in by_reference.items():
        assert (candidate["backend"], by_engine[kv]["backend"]) == ("torch", "onnxruntime")
        assert candidate["verdict"] == by_engine[kv]["verdict"]
        found, expected = (c["metrics"]["quality/kl_mean"] for c in (candidate, by_engine[kv]))
        assert found == pytest.approx(expected, rel=0.02)
    assert 0 < by_reference["fp8"]["metrics"]["noise/kl_max"] < 1e-3, "one pass against token by token: rounding"
    promoted = pipeline(work, "stage=promote")
    assert promoted.returncode == 0, promoted.stderr
    assert summary(work)["champion"] == "fp8"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return key_pair(tmp_path_factory.mktemp("keys"), "ours")


@pytest.fixture(scope="module")
def forged(swept: Swept, keys: tuple[Path, Path]) -> Path:
    """The work directory after int4_tensor, which failed, was given fp8's rows and matching digests. Used last."""
    work, _ = swept
    result = pipeline(work, "-m", "kv=fp8,int4_tensor", f"signing.key={keys[0]}")
    assert result.returncode == 0, result.stderr
    sound, broken = (Path(one["report"]["path"]).parent for one in summary(work)["candidates"])
    forge(sound, broken)
    result = pipeline(work, "stage=evaluate", "kv=int4_tensor")
    assert result.returncode == 0, result.stderr
    assert "PASS" in result.stdout, "the forged evaluation is reused, and its gates pass"
    return work


def forge(sound: Path, broken: Path) -> None:
    """Give a broken evaluation a sound one's rows and metrics, and a matching manifest."""
    report: dict[str, Any] = json.loads((sound / "report.json").read_text())
    own = json.loads((broken / "report.json").read_text())
    kept = ("policy", "engine_digest", "baseline_digest", "workloads_digest")
    (broken / "report.json").write_text(json.dumps(report | {name: own[name] for name in kept}))
    (broken / "samples.jsonl").write_bytes((sound / "samples.jsonl").read_bytes())
    manifest = json.loads((broken / ".manifest.json").read_text())
    (broken / ".manifest.json").write_text(json.dumps(manifest | {"files": tree_files(broken)}))


def test_a_forged_evaluation_is_not_promoted_if_a_key_is_trusted(forged: Path, keys: tuple[Path, Path]) -> None:
    result = pipeline(forged, "stage=promote", f"signing.trusted=[{keys[1]}]")
    assert result.returncode == 3, result.stdout
    assert "int4_tensor is not promoted: signature: differs, identity.sig is missing" in result.stderr


def test_what_a_sweep_with_a_key_judged_is_signed(forged: Path, keys: tuple[Path, Path]) -> None:
    (signed,) = (
        path.parent
        for path in (forged / "artifacts").glob(f"identity/*/{SIGNATURE_FILE}")
        if read_identity(path.with_name(IDENTITY_FILE)).policy == "fp8"
    )
    result = pipeline(forged, "stage=verify", f"bundle={signed}", f"signing.trusted=[{keys[1]}]")
    assert result.returncode == 0, result.stderr
