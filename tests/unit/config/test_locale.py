"""A locale that cannot express characters outside ASCII: commands that need them are refused, and others work."""

import os
import sys
from pathlib import Path
from subprocess import run

import pytest
from helpers.refusals import refused

from pipeline.config.compose import plan
from stages.core.errors import UserError

BYTES = "mod\udcc3\udca8le"
"""`modèle` as Python decodes it in such a locale."""


@pytest.mark.parametrize(
    ("arguments", "folders", "folder", "named"),
    [
        ([f"model.path={BYTES}"], [], "", "model.path"),
        (["model.path=modèle"], [], "", "model.path"),
        ([f"tracking.uri=sqlite:////{BYTES}.db"], [], "", "tracking.uri"),
        ([], [BYTES], "", "mod??le: "),
        (["kv=int8"], [], "modèle", "current directory="),
    ],
)
def test_only_characters_outside_ascii_are_refused(
    arguments: list[str], folders: list[str], folder: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "getfilesystemencoding", lambda: "ascii")
    assert plan(["kv=int8"], multirun=False).jobs[0].kv.name == "int8"
    (tmp_path / folder).mkdir(exist_ok=True)
    monkeypatch.chdir(tmp_path / folder)
    with refused(UserError, named, "holds characters outside ASCII, but this locale's encoding is ascii; set LC_ALL=C.UTF-8"):
        plan(arguments, multirun=False, folders=folders)


def test_results_with_other_characters_are_escaped() -> None:
    code = "from stages.core.streams import reserve_stdout; reserve_stdout(); print('modèle')"
    ascii_output = {**os.environ, "PYTHONIOENCODING": "ascii"}
    assert run([sys.executable, "-c", code], env=ascii_output, capture_output=True, check=True).stdout == b"mod\\xe8le\n"
