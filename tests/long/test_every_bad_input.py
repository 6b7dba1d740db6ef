"""All cases of bad input: tests/bad_input."""

from pathlib import Path

import pytest
from bad_input.case import Case, Commands, broken_promises
from bad_input.tables import CASES


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bad_input_is_refused_in_a_line_and_leaves_nothing(case: Case, commands: Commands, tmp_path: Path) -> None:
    assert broken_promises(case, commands, tmp_path) == []
