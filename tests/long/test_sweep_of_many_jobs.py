"""Many jobs at once over one work directory and one MLflow server: what a cluster's jobs do, with small evaluations.

`python -m pytest -s tests/long/test_sweep_of_many_jobs.py` prints what was measured (docs/scaling.md).
"""

import json
from collections import Counter
from pathlib import Path
from statistics import median

import pytest
from postgres import mlflow_server, postgres
from small_runs import open_tracking
from sweeps import Swept, ended, started

JOBS, AT_ONCE = 32, 8


def print_measured(work: Path, swept: Swept) -> None:
    measured = [json.loads(path.read_text()) for path in sorted((work / "small").glob("*.json"))]
    seconds, waits = sorted(one["seconds"] for one in measured), Counter[str]()
    worst: dict[str, float] = {}
    for one in measured:
        waits.update(one["waited"])
        for name, waited in one["waited"].items():
            worst[name] = max(worst.get(name, 0.0), waited)
    print(f"\n{len(measured)} jobs, {AT_ONCE} at once: {median(seconds):.2f} s a job, at most {seconds[-1]:.2f} s")
    for name, waited in waits.most_common():
        print(f"  waited for {name}: {waited / len(measured):.3f} s a job, at most {worst[name]:.2f} s")
    (summary,) = (work / "summaries").glob("*.json")
    size = summary.stat().st_size
    print(f"  {summary.name}: {size:,} bytes, {size // JOBS:,} a job; {swept.stderr.count('waiting for')} waits said")


def check_all_jobs_are_there(folder: Path, swept: Swept, uri: str | None) -> None:
    assert swept.code == 0, swept.stderr
    names = [f"fp8 seed={seed}" for seed in range(100, 100 + JOBS)]
    assert swept.names == names
    assert swept.summary["exit_codes"] == {str(number): 0 for number in range(1, JOBS + 1)}
    registered = [candidate["registration"]["model_version"] for candidate in swept.summary["candidates"]]
    assert len(set(registered)) == JOBS
    store = open_tracking(folder / "work", uri)
    assert {tags["verdict"] for _, tags in store.registered()} == {"PASS"}
    assert store.alias("champion") is None, "a job of a sweep promotes nothing"
    runs = store.client.search_runs([store.experiment_id], max_results=1000)
    assert {run.info.status for run in runs} == {"FINISHED"}
    shared = list((folder / "work" / "artifacts" / "quantize").glob("[!.]*"))
    assert len(shared) == JOBS + 1, "what all share is made once"


@pytest.mark.parametrize("kind", ["sqlite", "server"])
def test_many_jobs_at_once_lose_nothing(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    launcher = ("hydra/launcher=joblib", f"hydra.launcher.n_jobs={AT_ONCE}")

    def play(uri: str | None) -> None:
        with started(tmp_path, f"range(100,{100 + JOBS})", *launcher) as process:
            swept = ended(tmp_path, process, 3000)
        if swept.code == 0:
            print_measured(tmp_path / "work", swept)
        check_all_jobs_are_there(tmp_path, swept, uri)

    if kind == "sqlite":
        play(None)
        return
    with postgres() as database, mlflow_server(database, tmp_path / "artifacts") as address:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
        play(address)
