"""The location of the tracking store, and its name in addresses and commands."""

from pathlib import Path
from urllib.parse import parse_qs, urlparse

import pytest

from pipeline.config.config import ENVIRONMENT, Tracking
from pipeline.registry.tracking import Location, compare_url, locate, server_command
from stages.core.errors import UserError


def located(work: Path, uri: str | None = None, model: str = "tiny") -> Location:
    return locate(Tracking(), work, model, {} if uri is None else {ENVIRONMENT: uri})


def test_the_default_store_is_absolute_in_the_work_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    location = located(Path("work"), model="my model:v1/x")
    assert location.uri == f"sqlite:///{tmp_path}/work/mlflow.db"
    assert location.artifact_root == f"file://{tmp_path}/work/mlartifacts"
    assert (location.model_name, location.log_bundle) == ("kvgate-my_model_v1_x", True)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")  # another check refuses it, in a dry run after this one
    assert located(tmp_path / "loop").file == tmp_path / "loop" / "mlflow.db"


def test_an_empty_file_or_a_directory_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "empty.db").touch()
    for name, exists in (("empty.db", False), ("missing.db", False), ("", True)):
        location = located(tmp_path / "work", f"sqlite:///{tmp_path}/{name}")
        assert location.exists == exists
        assert location.lock == located(tmp_path / "other", location.uri).lock, "work directories may share a database"


@pytest.mark.parametrize("environ", [{}, {ENVIRONMENT: ""}])
def test_without_a_uri_a_path_that_a_uri_cannot_hold_is_refused(environ: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="MLflow keeps no store in a path with"):
        locate(Tracking(), tmp_path / "a%20b", "tiny", environ)


def test_a_server_keeps_its_artifacts_and_gets_no_bundles(tmp_path: Path) -> None:
    environ = {ENVIRONMENT: "http://server:5000"}
    assert locate(Tracking(uri="https://other"), tmp_path, "tiny", environ).uri == "https://other"
    location = locate(Tracking(), tmp_path, "tiny", environ)
    assert (location.uri, location.artifact_root, location.log_bundle) == ("http://server:5000", None, False)
    assert server_command(location) is None


@pytest.mark.parametrize(("uri", "shown"), [("ftp://me:hunter2@host", r"ftp://\*\*\*@host"), ("mlruns", "mlruns")])
def test_an_unusable_uri_is_refused_without_showing_its_password(uri: str, shown: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"MLFLOW_TRACKING_URI={shown}") as caught:
        located(tmp_path, uri)
    assert "hunter2" not in str(caught.value)


def test_the_shown_address_has_no_password_and_opens_the_sweep(tmp_path: Path) -> None:
    command = str(server_command(located(tmp_path, "postgresql://me:hunter2@db/mlflow")))
    assert "hunter2" not in command
    assert '--backend-store-uri "$MLFLOW_TRACKING_URI"' in command
    url = compare_url(located(tmp_path), "7", "20260101-a b")
    assert url.startswith("http://127.0.0.1:5000/#/experiments/7/runs?")
    query = parse_qs(urlparse(urlparse(url).fragment).query)
    expected = {"searchFilter": ["tags.sweep = '20260101-a b'"], "compareRunsMode": ["CHART"]}
    assert expected.items() <= query.items()
