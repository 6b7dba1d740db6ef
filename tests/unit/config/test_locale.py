"""A locale that cannot express characters outside ASCII: commands that need them are refused, and others work."""

import sys
from pathlib import Path

import pytest
from helpers.refusals import refused

from pipeline.config.compose import plan
from stages.core.errors import UserError

BYTES = "mod\udcc3\udca8le"
"""`modèle` as Python decodes it in such a locale."""
FIX = "holds characters outside ASCII, but this locale's encoding is ascii; set LC_ALL=C.UTF-8"


@pytest.fixture(autouse=True)
def ascii_locale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "getfilesystemencoding", lambda: "ascii")


@pytest.mark.parametrize("argument", [f"model.path={BYTES}", "model.path=modèle", f"tracking.uri=sqlite:////{BYTES}.db"])
def test_an_argument_is_refused(argument: str) -> None:
    with refused(UserError, argument.partition("=")[0], FIX):
        plan([argument], multirun=False)


def test_a_folder_of_options_is_refused() -> None:
    with refused(UserError, "mod??le: ", FIX):
        plan([], multirun=False, folders=[BYTES])


def test_the_current_directory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "modèle").mkdir()
    monkeypatch.chdir(tmp_path / "modèle")
    with refused(UserError, "current directory=", FIX):
        plan(["kv=int8"], multirun=False)


def test_ascii_works() -> None:
    assert plan(["kv=int8"], multirun=False).jobs[0].kv.name == "int8"
