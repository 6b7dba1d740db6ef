"""Bad input is refused in one line that names key or file, value and fix, before any work, and nothing is written.

`make test` runs every eighth case; `make test-long` runs all.
"""

from pathlib import Path

import pytest
from helpers.stride import STRIDE

from bad_input import configuration, models, work
from bad_input.case import Case, Commands, broken_promises

CASES = [*configuration.CASES, *models.CASES, *work.CASES]


@pytest.mark.every
@pytest.mark.parametrize("case", CASES[:: 1 if STRIDE == 1 else 8], ids=lambda case: case.name)
def test_bad_input_is_refused_in_a_line_and_leaves_nothing(case: Case, commands: Commands, tmp_path: Path) -> None:
    assert broken_promises(case, commands, tmp_path) == []
