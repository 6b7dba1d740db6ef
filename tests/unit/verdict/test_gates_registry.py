"""Gates and their lines are in one list; the tables of docs/ must match the list."""

import re
from pathlib import Path

from pipeline.config.compose import plan
from stages.verdict.gates import GATES, LINES
from stages.verdict.thresholds import Thresholds

VERDICT = (Path(__file__).resolve().parents[3] / "docs" / "verdict.md").read_text(encoding="utf-8")


def test_every_line_of_a_verdict_has_its_question_test_and_limit_in_the_documents() -> None:
    table = VERDICT.partition("| gate | question | test | limit")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| [^|]+ \| [^|]+ \|$", table, re.MULTILINE)
    assert rows == list(LINES)


def test_no_two_gates_write_the_same_line_and_thresholds_are_keys_of_the_command_line() -> None:
    assert len(LINES) == sum(len(gate.lines) for gate in GATES)
    (job,) = plan(["stage=evaluate"], multirun=False).jobs
    assert job.gates == Thresholds()
