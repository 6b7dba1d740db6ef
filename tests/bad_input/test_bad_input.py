"""Bad input is refused before any work, in one line with the key or file, the value and a fix. Nothing is written.

`make test` runs every eighth case; `make test-long` runs all.
"""

import re
from pathlib import Path

import pytest
from helpers.stride import STRIDE

from bad_input import configuration, models, work
from bad_input.forks import BadInput, RunCase, contents

CASES = [*configuration.CASES, *models.CASES, *work.CASES]
FIXES = re.compile(
    r"\b(give|given|set|use|choose|must|should|did you mean|remove|save|download|convert|leave|needs?|add|write|run|make|"
    r"install|is missing|put|free|start|raise|lower|export|copy|correct|change|quote|name|keep|judge|move|take|wait|"
    r"list|shorten)\b"
)
"""Verbs of suggested fixes."""


@pytest.mark.every
@pytest.mark.parametrize("case", CASES[:: 1 if STRIDE == 1 else 8], ids=lambda case: case.name)
def test_bad_input_is_refused_in_one_line_and_writes_nothing(case: BadInput, run_case: RunCase, tmp_path: Path) -> None:
    case.prepare(tmp_path)
    before = contents(tmp_path)
    outcome = run_case(case, tmp_path)
    assert outcome.code == case.code, outcome
    *headings, line = [line for line in outcome.stderr.splitlines() if not line.startswith("  ")]  # progress is indented
    assert not headings or case.runs_stage, headings
    assert line.startswith("pipeline: error: ")
    assert [part for part in case.expected if part not in outcome.stderr] == [], line
    assert FIXES.search(line), f"no fix: {line}"
    assert line.isprintable(), line
    assert len(line) <= 1500
    assert outcome.stdout == "" or case.runs_stage or case.loads_model
    assert outcome.heavy == () or case.loads_model
    assert contents(tmp_path) == before or case.file_bytes is not None, "only a full disk leaves files"
