"""What the main path left: what a build, a recommendation, a rollback and a second promotion make of it."""

import json
import re
from pathlib import Path

import pytest
from main_path import Swept, pipeline, summary


@pytest.fixture(scope="module")
def promoted(swept: Swept) -> Swept:
    """A sweep whose best engine is the champion."""
    result = pipeline(swept[0], "stage=promote")
    assert result.returncode == 0, result.stderr
    return swept


def test_a_build_in_between_leaves_the_candidates_of_the_last_sweep(promoted: Swept) -> None:
    before = summary(promoted[0])
    result = pipeline(promoted[0], "stage=build", "kv=int8")
    assert result.returncode == 0, result.stderr
    assert summary(promoted[0])["candidates"] == before["candidates"]


def test_the_engine_that_the_registry_holds_is_verified_from_what_lies_beside_it(promoted: Swept) -> None:
    """MLflow's directory of a model version is an engine with its evidence, outside the artifact store."""
    work, _ = promoted
    identities = (work / "mlartifacts").rglob("identity.json")
    (version,) = [path.parent for path in identities if '"policy": "fp8"' in path.read_text()]
    weights = version / "engine" / "weights.bin"
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    result = pipeline(work, "stage=verify", f"bundle={version}")
    assert (result.returncode, result.stderr.count("pipeline: error: ")) == (3, 1)
    assert f"bundle={version.relative_to(work.parent)} is not what was judged: engine: weights.bin\n" in result.stderr, (
        "and nothing else differs"
    )
    assert re.search(r"verdict, decided again +same +PASS", result.stdout)


USE = [
    "stage=recommend",
    "capacity.gpu_gib=1",
    "capacity.reserve_gib=0",
    "capacity.contexts=[{tokens: 320, requests: 1}]",
    "capacity.new_tokens=32",
]


def test_the_judged_policy_that_holds_most_is_recommended_from_what_the_sweep_left(promoted: Swept) -> None:
    work, _ = promoted
    aliases = summary(work)["champion"]
    result = pipeline(work, *USE, "kv=int8")
    assert result.returncode == 0, result.stderr
    assert re.search(r"Take fp8: [\d,]+ live tokens in [\d,]+ requests; PASS up to \d+ tokens, batch \d+ on ", result.stdout)
    assert "not int4_tensor (" in result.stdout
    assert "FAIL: " in result.stdout
    chosen = json.loads((work / "recommendation.json").read_text())["chosen"]
    candidate = next(candidate for candidate in summary(work)["candidates"] if candidate["policy"] == "fp8")
    assert chosen["engine_digest"] == candidate["engine"]["digest"]
    assert chosen["identity_digest"] == candidate["identity"]["digest"]
    assert summary(work)["champion"] == aliases

    result = pipeline(work, *USE, "capacity.contexts=[{tokens: 4096, requests: 1}]")
    assert (result.returncode, result.stderr.count("pipeline: error: ")) == (3, 1)
    assert re.search(r"not fp8 \([\d,]+\): PASS, but covered up to \d+ tokens and 4,096 are asked", result.stdout)


def test_the_evidence_in_the_registry_counts_in_another_work_directory(promoted: Swept, tmp_path: Path) -> None:
    database = (promoted[0] / "mlflow.db").resolve()
    result = pipeline(tmp_path / "work", *USE, f"tracking.uri=sqlite:///{database}")
    assert result.returncode == 0, result.stderr
    assert "evidence: version 1 of kvgate-tiny" in result.stdout
    assert not (tmp_path / "work" / "artifacts").exists()


def test_rollback_without_a_previous_champion_is_a_users_error(
    promoted: Swept,
) -> None:
    result = pipeline(promoted[0], "stage=rollback")
    assert result.returncode == 2
    assert result.stderr.count("pipeline: error: ") == 1
    assert "no previous champion" in result.stderr


def test_promote_refuses_an_engine_that_is_not_the_one_that_was_judged(
    promoted: Swept,
) -> None:
    work, _ = promoted
    engine = Path(next(c["engine"]["path"] for c in summary(work)["candidates"] if c["policy"] == "fp8"))
    kept = (engine / "kv_scales.json").read_bytes()
    (engine / "kv_scales.json").write_text("{}")
    try:
        result = pipeline(work, "stage=promote")
    finally:
        (engine / "kv_scales.json").write_bytes(kept)
    assert result.returncode == 3
    assert "fp8 is not promoted" in result.stderr
    assert summary(work)["exit_code"] == 3
