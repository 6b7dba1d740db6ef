"""The library of injected faults against its page."""

import re
from collections import Counter
from pathlib import Path

from faults.library import BY_NAME, FAULTS

ROOT = Path(__file__).resolve().parents[3]


def test_every_fault_has_a_unique_name_and_description() -> None:
    assert len(BY_NAME) == len({fault.models for fault in FAULTS}) == len(FAULTS)


def test_the_page_counts_the_faults_of_every_kind() -> None:
    page = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
    table = page.partition("| kind |")[2].partition("\n\n")[0]
    rows = {kind: int(count) for kind, count in re.findall(r"^\| (\w+) \|.*\| (\d+) \|$", table, re.MULTILINE)}
    assert rows == Counter(fault.kind for fault in FAULTS)
    assert f"has {len(FAULTS)} faults" in page


def test_a_test_names_every_fault() -> None:
    tests = (ROOT / "tests").rglob("test_*.py")
    text = "\n".join(path.read_text(encoding="utf-8") for path in tests)
    assert [fault.name for fault in FAULTS if f'"{fault.name}"' not in text] == []
