"""A command without a verdict leaves no report of an earlier command."""

from pathlib import Path

import pytest
from commands import run_job
from fake_stages import FakeBackend, use_fake_stages

from pipeline.config.compose import plan
from stages.core.errors import MissingRequirement


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
