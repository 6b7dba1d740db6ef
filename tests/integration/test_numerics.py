"""The report on the literature: its central claims on a small sample, and the consistency of the committed report."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from benchmarks.numerics import __main__ as command
from benchmarks.numerics import tiny
from benchmarks.numerics.explanations import DISAGREEMENTS, WHY
from benchmarks.numerics.lab import EXACT, Lab, dynamic, policy, static
from benchmarks.numerics.page import disagreements, markdown
from benchmarks.numerics.report import UNEXPLAINED, Report, Reports, changed_verdicts
from benchmarks.numerics.store import Store
from benchmarks.numerics.subject import SubjectName
from pipeline.artifacts.digest import files_digest, tree_files
from stages.engines.oracle.engine import OracleEngine
from stages.tiny.scores import CHECKPOINT

torch.set_num_threads(1)
DOCS = Path(__file__).resolve().parents[2] / "docs"

COUNTS = {"prose": 3, "retrieval": 2, "copy": 4}


def silent(*_: object) -> None:
    """Discard progress."""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(tiny.subject(COUNTS, long_count=1), tmp_path_factory.mktemp("numerics"), silent)


@pytest.fixture(scope="module")
def committed() -> Reports:
    return Reports.model_validate_json((DOCS / "numerics.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def both(committed: Reports) -> dict[SubjectName, Report]:
    assert committed.tiny is not None
    assert committed.smollm2 is not None
    return {"tiny": committed.tiny, "smollm2": committed.smollm2}


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
    assert both.accuracy is not None
    assert both.accuracy < 1.0
    assert rotated.accuracy == values.accuracy == 1.0


def test_an_unrounded_cache_is_the_baseline(lab: Lab) -> None:
    exact = lab.shipped(policy(EXACT))
    assert exact.mean_kl.value < 1e-12
    assert exact.perplexity_ratio.value == pytest.approx(1.0)


def test_what_was_measured_is_taken_from_the_store_and_not_computed_again(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = Lab(lab.subject, tmp_path, silent)
    monkeypatch.setattr(again, "_store", lab._store)
    measured = lab.shipped(policy(dynamic("int8")))

    def refuse(*_: object) -> None:
        raise AssertionError("computed although it is kept")

    monkeypatch.setattr(OracleEngine, "forced", refuse)
    assert again.shipped(policy(dynamic("int8"))).mean_kl == measured.mean_kl
    with pytest.raises(AssertionError, match="although it is kept"):
        again.shipped(policy(dynamic("int8"), recent=7))


def test_an_interrupted_write_leaves_nothing_that_is_taken_for_a_measurement(tmp_path: Path) -> None:
    store = Store(tmp_path, CHECKPOINT)

    def interrupted() -> npt.NDArray[np.floating]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.array("key", interrupted)
    np.testing.assert_array_equal(store.array("key", lambda: np.arange(3.0)), np.arange(3.0))


def test_the_committed_page_is_what_the_committed_data_renders_to(committed: Reports) -> None:
    assert (DOCS / "numerics.md").read_text(encoding="utf-8") == markdown(committed)


def test_the_committed_report_is_about_the_checkpoint_that_ships(
    both: dict[SubjectName, Report], tiny_checkpoint: Path
) -> None:
    assert both["tiny"].header.checkpoint == files_digest(tree_files(tiny_checkpoint))
    for report in both.values():
        assert len(report.sections) == len(command.SECTIONS)


def test_every_claim_that_does_not_hold_says_why_on_each_model(both: dict[SubjectName, Report]) -> None:
    for name, report in both.items():
        for claim in report.claims.values():
            assert (claim.verdict == "HOLDS") == (not claim.why), f"{name}: {claim.id}"
            assert claim.why != UNEXPLAINED, f"{name}: {claim.id}"
        left_over = {claim for claim in WHY[name] if report.claims[claim].verdict == "HOLDS"}
        assert not left_over, name


def test_every_claim_on_which_the_models_disagree_has_its_paragraph(committed: Reports) -> None:
    assert {claim.id for claim in disagreements(committed)} == DISAGREEMENTS.keys()


def test_check_fails_when_a_verdict_changed(
    both: dict[SubjectName, Report], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fresh = dict(both)
    monkeypatch.setattr(command, "measure", lambda name, *_: fresh[name])
    arguments = ["--check", f"--json={DOCS / 'numerics.json'}"]
    assert command.main(arguments) == 0
    section = next(section for section in both["tiny"].sections if section.claims)
    claim = section.claims[0]
    changed_claim = claim.model_copy(update={"verdict": "HOLDS" if claim.verdict != "HOLDS" else "UNDECIDED"})
    changed_section = section.model_copy(update={"claims": (changed_claim, *section.claims[1:])})
    sections = tuple(changed_section if s is section else s for s in both["tiny"].sections)
    fresh["tiny"] = both["tiny"].model_copy(update={"sections": sections})
    assert command.main(arguments) == 3
    assert f"{claim.verdict} -> {changed_claim.verdict}" in capsys.readouterr().out.replace("\n", " ")
    assert command.main([*arguments, "smollm2"]) == 0
    assert len(changed_verdicts("tiny", both["tiny"], fresh["tiny"])) == 1
