"""The notebook runs from its first cell to its last."""

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "examples" / "kvgate.ipynb"


def test_the_notebook_judges_two_policies_and_asks_an_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    read: Any = nbformat.read  # untyped
    notebook = read(NOTEBOOK, as_version=4)
    shown_before = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert len(shown_before) == 6, "it is stored with its outputs"
    assert str(ROOT) not in str(shown_before)
    NotebookClient(notebook, timeout=1800, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert {output.output_type for output in outputs} <= {"stream", "execute_result", "display_data"}
    shown = [output.data["text/plain"] for output in outputs if "data" in output]
    assert [verdict in text for verdict, text in zip(("INCONCLUSIVE", "FAIL", "int8"), shown, strict=True)] == [True] * 3
    printed = "".join(output.text for output in outputs if output.output_type == "stream")
    assert "04 Bergen 14 Tartu" in printed
    assert "became" in printed
    assert (tmp_path / "work" / "junit.xml").is_file()
