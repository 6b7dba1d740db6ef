"""Environment variables that a library refuses are bad input, not defects. A removed current directory is named."""

import errno
import importlib
import sys
from pathlib import Path

import pytest

from stages.core.errors import DEFECT, describe, exit_code

WHILE_IMPORTED = "import os\nint(os.environ['LIBRARY_SIZE'])"
IN_A_FUNCTION = """
import os
VARIABLE = "LIBRARY_SIZE"
def read():
    refuse(os.environ[VARIABLE])
def refuse(value):
    raise ValueError(f"not a size: {value}, must be a number")
read()
"""
NAMED_IN_THE_MESSAGE = """
import os
def read(name):
    raise ValueError(f"failed to convert {os.environ[name]!r} for {name}")
read("LIBRARY" + "_SIZE")
"""
OF_ANOTHER_VALUE = "import os\nos.environ['LIBRARY_SIZE']\nint('big')"


def error_of(code: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> Exception:
    """Return the exception that a module raises while it is imported; LIBRARY_SIZE is `many`."""
    (directory / "library.py").write_text(code)
    monkeypatch.syspath_prepend(str(directory))
    monkeypatch.setenv("LIBRARY_SIZE", "many")
    with pytest.raises(ValueError, match=r"many|big") as caught:
        importlib.import_module("library")
    sys.modules.pop("library", None)
    return caught.value


@pytest.mark.parametrize("code", [WHILE_IMPORTED, IN_A_FUNCTION, NAMED_IN_THE_MESSAGE])
def test_a_variable_that_a_library_refuses_is_named(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = error_of(code, tmp_path, monkeypatch)
    assert exit_code(error) == 2
    assert describe(error).startswith("LIBRARY_SIZE: a library refuses this environment variable (ValueError: ")
    assert describe(error).endswith("; correct or unset it")


@pytest.mark.parametrize("code", [OF_ANOTHER_VALUE, f"__name__ = 'stages.library'\n{WHILE_IMPORTED}"])
def test_an_exception_about_another_value_or_of_kvgates_own_code_stays_a_defect(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert exit_code(error_of(code, tmp_path, monkeypatch)) == DEFECT


def test_a_removed_current_directory_is_named() -> None:
    assert describe(FileNotFoundError(errno.ENOENT, "No such file")).startswith("the current directory: No such file; make it")
