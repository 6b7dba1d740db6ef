"""The location of the tracking store, and its name in addresses and commands."""

import os
import subprocess
import sys
from pathlib import Path
from urllib.parse import parse_qs, urlparse

import pytest
from pydantic import ValidationError

from pipeline.chain.run import open_store
from pipeline.registry.tracking import Tracking, compare_url, locate, server_command
from stages.core.errors import UserError


def test_a_work_directory_that_links_to_itself_has_a_location(tmp_path: Path) -> None:
    """Another check refuses it, in a dry run after this one."""
    (tmp_path / "work").symlink_to(tmp_path / "work")
    assert locate(Tracking(), tmp_path / "work", "tiny", {}).file == tmp_path / "work" / "mlflow.db"


def test_the_store_is_absolute_and_in_the_work_directory_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    location = locate(Tracking(), Path("work"), "tiny", {})
    assert location.uri == f"sqlite:///{tmp_path}/work/mlflow.db"
    assert location.artifact_root == f"file://{tmp_path}/work/mlartifacts"
    assert location.model_name == "kvgate-tiny"
    assert location.log_bundle


def test_an_empty_file_is_no_store_yet_and_a_directory_is_left_to_the_refusal_on_opening(tmp_path: Path) -> None:
    (tmp_path / "empty.db").touch()
    for name, exists in (("empty.db", False), ("missing.db", False), ("", True)):
        assert locate(Tracking(uri=f"sqlite:///{tmp_path}/{name}"), tmp_path, "tiny", {}).exists == exists


def test_the_configuration_wins_and_a_server_keeps_its_artifacts_itself_and_gets_no_bundles(tmp_path: Path) -> None:
    environ = {"MLFLOW_TRACKING_URI": "http://server:5000"}
    assert locate(Tracking(uri="https://other"), tmp_path, "tiny", environ).uri == "https://other"
    location = locate(Tracking(), tmp_path, "tiny", environ)
    assert (location.uri, location.artifact_root, location.log_bundle) == ("http://server:5000", None, False)
    assert server_command(location) is None


def test_work_directories_that_share_a_database_share_its_lock(tmp_path: Path) -> None:
    tracking = Tracking(uri=f"sqlite:///{tmp_path}/shared.db")
    assert locate(tracking, tmp_path / "a", "tiny", {}).lock == locate(tracking, tmp_path / "b", "tiny", {}).lock


def test_an_unusable_uri_is_refused_without_showing_its_password(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"MLFLOW_TRACKING_URI=ftp://\*\*\*@host") as caught:
        locate(Tracking(), tmp_path, "tiny", {"MLFLOW_TRACKING_URI": "ftp://me:hunter2@host"})
    assert "hunter2" not in str(caught.value)
    with pytest.raises(UserError, match="MLFLOW_TRACKING_URI=mlruns"):
        locate(Tracking(), tmp_path, "tiny", {"MLFLOW_TRACKING_URI": "mlruns"})


def test_a_model_label_becomes_a_name_that_the_registry_accepts(tmp_path: Path) -> None:
    assert locate(Tracking(), tmp_path, "my model:v1/x", {}).model_name == "kvgate-my_model_v1_x"
    with pytest.raises(ValidationError):
        Tracking(model_name="a/b")


def test_the_command_never_shows_a_password_and_the_address_opens_the_charts_of_a_sweep(tmp_path: Path) -> None:
    environment = {"MLFLOW_TRACKING_URI": "postgresql://me:hunter2@db/mlflow"}
    command = str(server_command(locate(Tracking(), tmp_path, "tiny", environment)))
    assert "hunter2" not in command
    assert '--backend-store-uri "$MLFLOW_TRACKING_URI"' in command
    url = compare_url(locate(Tracking(), tmp_path, "tiny", {}), "7", "20260101-a b")
    assert url.startswith("http://127.0.0.1:5000/#/experiments/7/runs?")
    query = parse_qs(urlparse(urlparse(url).fragment).query)
    expected = {"searchFilter": ["tags.sweep = '20260101-a b'"], "compareRunsMode": ["CHART"]}
    assert expected.items() <= query.items()


def test_tracking_that_is_off_opens_no_store(tmp_path: Path) -> None:
    assert open_store(Tracking(enabled=False), tmp_path, "tiny") is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("stage", ["status", "prune"])
def test_without_a_store_nothing_waits_for_mlflow(stage: str, tmp_path: Path) -> None:
    (tmp_path / "artifacts").mkdir()
    code = "import sys; from pipeline.__main__ import main; code = main(); sys.exit(code or 'mlflow' in sys.modules)"
    run = [sys.executable, "-c", code, f"stage={stage}", f"workdir={tmp_path}"]
    assert (
        subprocess.run(run, check=False, env={**os.environ, "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/no.db"}).returncode
        == 0
    )
