"""A sweep by joblib, with real workers over a small evaluation; test_every_launcher.py has the others, and more endings."""

from pathlib import Path

import pytest
from sweeps import JOBLIB, sweep


def test_a_job_that_is_refused_in_a_worker_gives_the_sweep_its_exit_code(tmp_path: Path) -> None:
    """The first candidate ends after the second, and the third job is bad input that shows late."""
    swept = sweep(tmp_path, "0,5,2", *JOBLIB)
    assert swept.code == 2, swept.stderr
    assert swept.names == ["fp8 seed=0", "fp8 seed=5"]
    assert "  job 2 of 3 fp8 seed=5: small fp8 seed=5: began" in swept.stderr.splitlines()
    assert "pipeline: error: job 3 of 3 fp8 seed=2: seed=2: is bad input that shows late; give another" in swept.stderr
    assert (swept.summary["exit_code"], swept.summary["exit_codes"]) == (2, {"1": 0, "2": 0, "3": 2})


def test_a_job_that_starts_slowly_is_named_from_its_first_line_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMALL_SWEEPS_START_S", "3")
    swept = sweep(tmp_path, "0,5", *JOBLIB)
    assert swept.code == 0, swept.stderr
    lines = [line for line in swept.stderr.splitlines() if ": starting: " in line]
    assert {line.partition(": starting")[0] for line in lines} == {"  job 1 of 2 fp8 seed=0", "  job 2 of 2 fp8 seed=5"}
