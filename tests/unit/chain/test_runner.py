"""A command without a verdict leaves no report of an earlier command."""

from pathlib import Path

import pytest
from commands import run_job
from fake_stages import FakeBackend, use_fake_stages

from pipeline.chain import runner
from pipeline.config.compose import plan
from pipeline.registry import summary
from stages.core.errors import MissingRequirement, UserError


@pytest.mark.parametrize("is_file", [True, False])
def test_an_old_report_is_removed_with_a_line_and_never_hides_the_error(
    is_file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(self: FakeBackend, bundle: Path) -> None:  # noqa: ARG001
        raise MissingRequirement("no GPU")

    use_fake_stages(monkeypatch)
    monkeypatch.setattr(FakeBackend, "load", refuse)
    page = tmp_path / "report.html"
    page.write_text("yesterday's") if is_file else page.mkdir()  # a folder cannot be unlinked
    (config,) = plan([f"workdir={tmp_path}", "calibration.samples=4", "tracking=none", "stage=evaluate"], multirun=False).jobs
    for said in (is_file, False):
        with pytest.raises(MissingRequirement, match="no GPU"):
            run_job(config)
        assert ("report.html of an earlier command was removed" in capsys.readouterr().out) == said
    assert page.exists() == (not is_file)


@pytest.mark.parametrize("written", ["finish", "note"])
def test_a_summary_that_cannot_be_written_does_not_replace_the_error_of_the_job(
    written: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise MissingRequirement("no GPU")

    def full(*_: object, **__: object) -> None:
        raise UserError("summary.json cannot be written")

    monkeypatch.setitem(runner.STAGES, "evaluate", refuse)
    (config,) = plan([f"workdir={tmp_path}", "tracking=none", "stage=evaluate"], multirun=False).jobs
    monkeypatch.setattr(summary, "begin", lambda *_, **__: None)
    monkeypatch.setattr(summary, written, full)
    with pytest.raises(MissingRequirement, match="no GPU"):
        run_job(config)
    assert "is not recorded: summary.json cannot be written" in capsys.readouterr().err
