"""The exit code stays the same if a command's streams are closed or write to a full disk."""

import subprocess
import sys
from pathlib import Path

import pytest

REDIRECTIONS = (">&-", "<&- >&- 2>&-", ">/dev/full", ">/dev/full 2>/dev/full")


@pytest.mark.parametrize(
    ("arguments", "code", "redirection"),
    [
        *(("stage=capacity", 0, redirection) for redirection in REDIRECTIONS),
        *(("stage=capacity log=json", 0, redirection) for redirection in ("2>&-", "2>/dev/full")),
        *(("stage=nothing", 2, redirection) for redirection in ("2>&-", "2>/dev/full")),
    ],
)
def test_closed_and_full_streams_leave_the_exit_code(redirection: str, arguments: str, code: int, tmp_path: Path) -> None:
    command = f"{sys.executable} -m pipeline {arguments} workdir={tmp_path}/work {redirection}"
    ended = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert ended.returncode == code, ended.stderr
    assert "Traceback" not in ended.stderr
