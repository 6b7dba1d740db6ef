"""The whole path on the trained tiny model, through the command line: sweep, verdicts, promotion, refusals, rollback."""

import html
import shlex
import shutil
from pathlib import Path

import pytest
from helpers.commands.tiny_model import FEW, Swept, command, summary, sweep


def test_a_sweep_judges_against_one_baseline_and_promotes_none(swept: Swept) -> None:
    work, result = swept
    content = summary(work)
    by_name = {candidate["policy"]: candidate for candidate in content["candidates"]}
    assert set(by_name) == {"fp8", "int4_tensor"}
    assert by_name["fp8"]["verdict"] == "PASS", by_name["fp8"]["reasons"]
    assert by_name["int4_tensor"]["verdict"] == "FAIL"
    assert by_name["int4_tensor"]["reasons"]
    assert by_name["fp8"]["baseline"] == by_name["int4_tensor"]["baseline"]
    assert by_name["fp8"]["engine"]["digest"] != by_name["int4_tensor"]["engine"]["digest"]
    assert [by_name[kv]["metrics"]["memory/kib_per_token"] for kv in ("fp8", "int4_tensor")] == [1.0, 0.5]
    assert (content["champion"], content["exit_code"]) == (None, 0)
    assert [path.name for path in work.parent.iterdir()] == ["work"], "something was written outside the work directory"
    for version in ("1", "2"):
        assert f"registered: kvgate-tiny version {version} at MLflow's store sqlite:///" in result.stdout
    assert "int4_tensor" in result.stdout
    assert f"/runs?searchFilter=tags.sweep%20%3D%20%27{content['sweep']}%27&" in result.stdout, (
        "the address of the comparison in MLflow"
    )


def test_a_sweeps_report_is_also_in_its_mlflow_runs(swept: Swept) -> None:
    work, result = swept
    page = work / "report.html"
    text = page.read_text(encoding="utf-8")
    assert "report: work/report.html" in result.stdout
    assert page.stat().st_size < 3_000_000
    for candidate in summary(work)["candidates"]:
        assert f"stage=verify bundle={Path(candidate['identity']['path']).parent}" in text
        assert all(check["where"] in text for check in candidate["checks"])
        attached = work / "mlartifacts" / candidate["run_id"] / "artifacts" / page.name
        assert attached.read_bytes() == page.read_bytes()
    arguments = [f"workdir={work}", *FEW, "-m", "kv=fp8,int4_tensor"]
    repeated = summary(work)["command"]
    assert sorted(shlex.split(repeated)[3:]) == sorted(arguments)
    assert repeated in html.unescape(text)
    assert "Prompt</summary>" in text, "answers of int4_tensor are lost, and shown with their prompts"
    assert "is not complete" not in result.stderr


def test_no_secret_of_the_environment_is_written_or_printed(swept: Swept) -> None:
    work, result = swept
    leaking = [path for path in work.parent.rglob("*") if path.is_file() and b"hunter2" in path.read_bytes()]
    assert leaking == []
    assert "hunter2" not in result.stdout + result.stderr


@pytest.fixture
def sharing(swept: Swept, tmp_path: Path) -> Path:
    """An empty work directory with the artifacts of the sweep."""
    work = tmp_path / "sharing" / "work"
    work.mkdir(parents=True)
    (work / "artifacts").symlink_to(swept[0] / "artifacts")
    return work


def test_a_second_sweep_reuses_artifacts_and_promotes(swept: Swept, sharing: Path) -> None:
    """Run the command that the sweep prints at its end, as a user would paste it."""
    work, result = sweep(sharing)
    new_artifacts = [line for line in result.stderr.splitlines() if "/artifacts/" in line and "reused" not in line]
    assert new_artifacts == []
    first, second = ({c["identity"]["digest"] for c in summary(path)["candidates"]} for path in (swept[0], work))
    assert first == second

    (printed,) = [line for line in result.stdout.splitlines() if "stage=promote" in line]
    program, *arguments = shlex.split(printed)
    assert Path(program).name == "python", "its path is printed only if a shell would find another python"
    assert arguments[:2] == ["-m", "pipeline"]
    result = command(arguments[2:], work.parent)
    assert result.returncode == 0, result.stderr
    assert summary(work)["champion"] == "fp8"
    assert "-m pipeline stage=verify bundle=" in result.stdout
    assert "Serve it with: pipeline.api.load('" in result.stdout
    assert "not int4_tensor: FAIL" in result.stdout
    assert "mlflow server --backend-store-uri" in result.stdout
    page = (work / "report.html").read_text(encoding="utf-8")
    assert "★ champion" in page
    assert summary(work)["command"] in html.unescape(page), "what judged the candidates, not what promoted one"
    assert "hydra.job" not in page
    assert "fp8 (version" in page


def test_an_engine_build_leaves_a_bundle_that_needs_nothing_else(swept: Swept, tmp_path: Path) -> None:
    from stages.engines.onnx.engine import load_engine

    engine = Path(summary(swept[0])["candidates"][0]["engine"]["path"])
    moved = shutil.copytree(engine, tmp_path / "elsewhere")
    assert load_engine(moved, threads=1).generate([[1, 2, 3]], 2, ())[0]
