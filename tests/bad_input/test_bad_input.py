"""Bad input is refused in one line that names key or file, value and fix, before any work, and nothing is written."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from bad_input.case import Case, Commands, broken_promises, contents
from bad_input.tables import CASES


@pytest.fixture(scope="module")
def commands() -> Iterator[Commands]:
    with Commands() as commands:
        yield commands


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bad_input_is_refused_in_a_line_and_leaves_nothing(case: Case, commands: Commands, tmp_path: Path) -> None:
    case.prepare(tmp_path)
    before = contents(tmp_path)
    outcome = commands.run(case, tmp_path)
    assert broken_promises(case, outcome, before, contents(tmp_path)) == [], outcome.stderr + outcome.stdout
