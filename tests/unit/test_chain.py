"""The chain of artifacts: what it needs is named when it is missing."""

import sys

import pytest

from pipeline.chain import entry
from pipeline.errors import MissingRequirement, exit_code


def test_a_library_that_is_not_installed_is_named_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "stages.plots", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)
    with pytest.raises(MissingRequirement, match=r"stages\.plots needs matplotlib, .* pip install matplotlib") as caught:
        entry("stages.plots", "kl_by_context")
    assert exit_code(caught.value) == 4


def test_a_module_of_ours_that_is_missing_is_a_defect() -> None:
    with pytest.raises(ModuleNotFoundError):
        entry("stages.nothing", "at_all")
