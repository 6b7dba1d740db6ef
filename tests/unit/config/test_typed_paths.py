"""Paths with any characters are accepted as typed, and printed next commands quote them correctly."""

import shlex
from pathlib import Path

import pytest

from pipeline.cli.commands import standing
from pipeline.config.compose import plan

PATHS = [
    "/data/modèle",
    "模型/7b",
    "/data/a=b",
    "/data/#1",
    "/data/[7b]",
    "[7b]/model",
    "{a}/b",
    "/data/(1)",
    "/data/it's",
    "/data/\"x\" and 'y'",
    "~/modèle; rm?&*!",
    "/data/ü ",
    "/data/back\\slash\\",
    "/data/$x%20",
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("key", ["model.path", "workdir", "calibration.jsonl", "workloads.jsonl", "promote.name"])
def test_a_path_arrives_as_it_is_typed(key: str, path: str) -> None:
    typed = [f"{key}={path}", *(["stage=promote"] if key == "promote.name" else [])]
    (job,) = plan(typed, multirun=False).jobs
    first, _, last = key.partition(".")
    assert (getattr(getattr(job, first), last) if last else getattr(job, first)) == path


@pytest.mark.parametrize("path", PATHS)
def test_jobs_of_a_sweep_and_next_commands_have_the_path(path: str) -> None:
    planned = plan([f"workdir={path}", "kv=fp8,int8"], multirun=True)
    assert [job.workdir for job in planned.jobs] == [path, path]
    printed = shlex.split(standing(planned.jobs[0], "status"))
    again = plan(printed[printed.index("pipeline") + 1 :], multirun=False)
    assert again.jobs[0].workdir == path


def test_a_quoted_path_and_one_with_a_variable_stay_what_they_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVGATE_DATA", str(tmp_path))
    for typed, path in (("'/a,b'", "/a,b"), ('"/é"', "/é"), ("/a\\,b", "/a,b"), ("${oc.env:KVGATE_DATA}/é", f"{tmp_path}/é")):
        assert plan([f"workdir={typed}"], multirun=False).jobs[0].workdir == path
