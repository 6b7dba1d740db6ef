"""The rows of a sound cache in the evaluation of a broken one, with every digest made to fit: who refuses it, and by what."""

import json
from pathlib import Path
from typing import Any

import pytest
from main_path import pipeline
from signing_keys import key_pair

from pipeline.artifacts.digest import tree_files


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
