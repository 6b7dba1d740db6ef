"""A gate is declared once: thresholds, the bounds of a policy, the report and the table of docs/trust.md follow from that."""

import re
from pathlib import Path

from pipeline.config.compose import plan
from pipeline.trust.policy import BOUNDED, LoosestGates
from pipeline.verdict.gates import GATES, LINES, Gates
from pipeline.verdict.thresholds import Limits

TRUST = (Path(__file__).resolve().parents[2] / "docs" / "trust.md").read_text(encoding="utf-8")


def test_the_table_of_the_documents_has_a_row_for_every_line_with_its_threshold() -> None:
    table = TRUST.partition("| gate | default |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| `(\w+)` \| ([\d.]*) ?\| (\w+) \|", table, re.MULTILINE)
    defaults = Gates().model_dump()
    assert rows == [(key, f"{defaults.get(key, '')}", line.per) for key, line in sorted(LINES.items(), key=_place)]


def _place(item: tuple[str, object]) -> int:
    return [key for gate in GATES for key in gate.lines].index(item[0])


def test_the_gates_that_look_are_next_to_each_other_and_no_two_have_one_place() -> None:
    looking = [gate.looks for gate in GATES]
    assert sorted(looking[looking.index(True) :], reverse=True) == looking[looking.index(True) :]
    assert len({gate.rank for gate in GATES}) == len(GATES)


def test_every_threshold_is_a_key_of_the_command_line_and_is_bounded_by_a_policy_where_it_has_a_looser_side() -> None:
    (job,) = plan(["stage=evaluate"], multirun=False).jobs
    assert job.gates == Gates()
    own = {name for gate in GATES for name in gate.limits.model_fields}
    assert Gates.model_fields.keys() == own
    assert LoosestGates.model_fields.keys() == {*BOUNDED, "margins"}
    assert own - BOUNDED.keys() == {"attempt", "power", "max_rounds", "margins"}
    assert Limits.model_fields.keys() < own
