"""Bad input is refused in one line that names key or file, value and fix, before any work, and nothing is written.

`make test` runs every eighth case; `make test-long` runs all.
"""

import re
from pathlib import Path

import pytest
from helpers.stride import STRIDE

from bad_input import configuration, models, work
from bad_input.case import Case, contents
from bad_input.forks import Commands

CASES = [*configuration.CASES, *models.CASES, *work.CASES]
FIXES = re.compile(
    r"\b(give|given|set|use|choose|must|should|did you mean|remove|save|download|convert|leave|needs?|add|write|run|make|"
    r"install|is missing|put|free|start|raise|lower|export|copy|correct|change|quote|name|keep|judge|move|take|wait|list)\b"
)
"""Verbs that a suggested fix contains."""


@pytest.mark.every
@pytest.mark.parametrize("case", CASES[:: 1 if STRIDE == 1 else 8], ids=lambda case: case.name)
def test_bad_input_is_refused_in_a_line_and_leaves_nothing(case: Case, commands: Commands, tmp_path: Path) -> None:
    case.prepare(tmp_path)
    before = contents(tmp_path)
    done = commands.run(case, tmp_path)
    assert done.code == case.code, done
    (line,) = [line for line in done.stderr.splitlines() if not line.startswith("  ")]  # progress lines start with spaces
    assert line.startswith("pipeline: error: ")
    assert [part for part in case.says if part not in done.stderr] == [], line
    assert FIXES.search(line), f"no fix: {line}"
    assert line.isprintable(), line
    assert len(line) <= 1500
    assert done.stdout == "" or case.begins or case.loads_model
    assert done.heavy == () or case.loads_model
    assert contents(tmp_path) == before
