"""`python -m pipeline.lm_eval` if lm-eval is not installed."""

import sys

import pytest

from pipeline.lm_eval.__main__ import main


def test_without_lm_eval_the_command_says_what_to_install_and_ends_with_4(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "lm_eval" or name == "pipeline.lm_eval.model"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert main() == 4
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("pipeline.lm_eval: error: lm_eval is not installed here: pip install")
