"""The report on the literature: its central claims on a small sample, and the consistency of the committed report."""

from pathlib import Path

import pytest
import torch

from benchmarks.numerics import __main__ as command
from benchmarks.numerics.lab import EXACT, Lab, dynamic, policy, static
from benchmarks.numerics.report import UNEXPLAINED, Report, changed_verdicts, markdown
from pipeline.artifacts.digest import files_digest, tree_files

torch.set_num_threads(1)
DOCS = Path(__file__).resolve().parents[2] / "docs"

COUNTS = {"prose": 3, "retrieval": 2, "copy": 4}


def silent(*_: object) -> None:
    """Discard progress."""


@pytest.fixture(scope="module")
def lab() -> Lab:
    return Lab(silent, COUNTS, long_count=1)


@pytest.fixture(scope="module")
def committed() -> Report:
    return Report.model_validate_json((DOCS / "numerics.json").read_text(encoding="utf-8"))


def test_formats_order_as_published_from_int8_on(lab: Lab) -> None:
    order = [dynamic("int8"), static("int8"), dynamic("int4", 32), dynamic("int4"), static("int4")]
    errors = [lab.shipped(policy(form)).mean_kl.value for form in order]
    assert errors == sorted(errors)
    assert errors[0] < 1e-3
    assert errors[-1] > 1


def test_int4_costs_the_keys_and_a_rotation_or_a_recent_window_saves_them(lab: Lab) -> None:
    int4 = dynamic("int4")
    both, keys, values = (lab.shipped(policy(*sides)) for sides in ((int4,), (int4, EXACT), (EXACT, int4)))
    rotated = lab.shipped(policy(dynamic("int4", rotation="hadamard")))
    recent = lab.shipped(policy(int4, recent=256))
    assert keys.mean_kl.value > 20 * values.mean_kl.value
    assert rotated.mean_kl.value < both.mean_kl.value / 10
    assert recent.mean_kl.value < both.mean_kl.value / 4
    assert both.accuracy < rotated.accuracy == values.accuracy == 1.0


def test_an_unrounded_cache_is_the_baseline(lab: Lab) -> None:
    exact = lab.shipped(policy(EXACT))
    assert exact.mean_kl.value < 1e-12
    assert exact.perplexity_ratio.value == pytest.approx(1.0)


def test_the_committed_page_is_what_the_committed_data_renders_to(committed: Report) -> None:
    assert (DOCS / "numerics.md").read_text(encoding="utf-8") == markdown(committed)


def test_the_committed_report_is_about_the_checkpoint_that_ships(committed: Report, tiny_checkpoint: Path) -> None:
    assert committed.header.checkpoint == files_digest(tree_files(tiny_checkpoint))
    assert len(committed.sections) == len(command.SECTIONS)


def test_every_claim_that_does_not_hold_says_why(committed: Report) -> None:
    for claim in committed.claims.values():
        assert (claim.verdict == "HOLDS") == (not claim.why), claim.id
        assert claim.why != UNEXPLAINED, claim.id


def test_check_fails_when_a_verdict_changed(
    committed: Report, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "measure", lambda _report: committed)
    arguments = ["--check", f"--json={DOCS / 'numerics.json'}"]
    assert command.main(arguments) == 0
    section = next(section for section in committed.sections if section.claims)
    claim = section.claims[0]
    changed_claim = claim.model_copy(update={"verdict": "HOLDS" if claim.verdict != "HOLDS" else "UNDECIDED"})
    changed_section = section.model_copy(update={"claims": (changed_claim, *section.claims[1:])})
    sections = tuple(changed_section if s is section else s for s in committed.sections)
    fresh = committed.model_copy(update={"sections": sections})
    monkeypatch.setattr(command, "measure", lambda _report: fresh)
    assert command.main(arguments) == 3
    assert f"{claim.verdict} -> {changed_claim.verdict}" in capsys.readouterr().out.replace("\n", " ")
    assert len(changed_verdicts(committed, fresh)) == 1
