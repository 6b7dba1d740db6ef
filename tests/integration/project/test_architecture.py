"""The path of a command in docs/architecture.md is the path that it takes."""

import inspect
import re
from pathlib import Path

import pytest
from helpers.commands.tiny_model import FEW, command

from stages.engines.onnx.engine import GraphSession

ROOT = Path(__file__).resolve().parents[3]
MAX_FRAMES = 12


def test_a_decode_step_passes_the_functions_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader must be able to follow a command to ONNX Runtime."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    functions = page.partition("passes these functions")[2].partition("Other engines differ")[0]
    found, passed = tmp_path / "functions", GraphSession.run

    def stop_at_a_decode_step(session: GraphSession) -> None:
        codes = [info.frame.f_code for info in inspect.stack()[1:]]
        folders = str(ROOT / "pipeline"), str(ROOT / "stages")
        names = [code.co_qualname for code in codes if code.co_filename.startswith(folders)]
        if "PagedEngine._decode" in names:
            found.write_text("\n".join(["GraphSession.run", *names]))
            raise KeyboardInterrupt
        passed(session)

    monkeypatch.setattr(GraphSession, "run", stop_at_a_decode_step)
    few = [*FEW, "workloads.conformance_samples=0", "tracking=none"]
    ended = command([f"workdir={tmp_path / 'work'}", *few, "kv=int8"], tmp_path)
    assert found.is_file(), ended.stderr
    names = found.read_text().splitlines()[::-1]
    names = names[names.index("main") + 1 :]
    assert names == re.findall("`([^`]+)`", functions)[1:]
    assert len(names) <= MAX_FRAMES
