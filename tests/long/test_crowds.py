"""Two rounds of eight processes over one work directory and one store: SQLite, and MLflow's server on PostgreSQL."""

from pathlib import Path

from crowds import play
from postgres import mlflow_server, postgres

ROUNDS = 2


def test_nothing_is_lost_on_sqlite(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    play(tmp_path / "work", tmp_path / "model.safetensors", ROUNDS)


def test_nothing_is_lost_on_a_server_with_postgresql(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    with postgres() as database, mlflow_server(database, tmp_path / "artifacts") as address:
        play(tmp_path / "work", tmp_path / "model.safetensors", ROUNDS, address)
