"""A gate is declared once: thresholds, the report and the tables of docs/ follow from that."""

import re
from pathlib import Path

from pipeline.config.compose import plan
from pipeline.verdict.gates import GATES, LINES, Gates
from pipeline.verdict.thresholds import Limits

VERDICT = (Path(__file__).resolve().parents[2] / "docs" / "verdict.md").read_text(encoding="utf-8")


def test_every_line_of_a_verdict_has_its_question_test_and_limit_in_the_documents() -> None:
    table = VERDICT.partition("| gate | question | test | limit")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| [^|]+ \| [^|]+ \|$", table, re.MULTILINE)
    assert rows == [key for key, _ in sorted(LINES.items(), key=_place)]


def _place(item: tuple[str, object]) -> int:
    return [key for gate in GATES for key in gate.lines].index(item[0])


def test_the_gates_that_look_are_next_to_each_other_and_no_two_have_one_place() -> None:
    looking = [gate.looks for gate in GATES]
    assert sorted(looking[looking.index(True) :], reverse=True) == looking[looking.index(True) :]
    assert len({gate.rank for gate in GATES}) == len(GATES)


def test_every_threshold_is_a_key_of_the_command_line() -> None:
    (job,) = plan(["stage=evaluate"], multirun=False).jobs
    assert job.gates == Gates()
    own = {name for gate in GATES for name in gate.limits.model_fields}
    assert Gates.model_fields.keys() == own
    assert Limits.model_fields.keys() < own
