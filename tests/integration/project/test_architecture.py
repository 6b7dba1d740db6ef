"""docs/architecture.md lists the functions that a command really passes, in few files."""

import re
import subprocess
import sys
from pathlib import Path

from helpers.commands.tiny_model import FEW, MAX_SECONDS

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
MAX_FRAMES = 12
MAX_FILES = 25
"""Maximum files that a maintainer opens to follow a command from the command line to ONNX Runtime."""

RECORDER = """
import inspect, sys
from pathlib import Path
from pipeline.__main__ import main
from stages.engines.onnx.engine import GraphSession

out, root, *arguments = sys.argv[1:]
run = GraphSession.run

def stop_at_a_decode_step(session):
    codes = [info.frame.f_code for info in inspect.stack()[1:]]
    names = [code.co_qualname for code in codes if code.co_filename.startswith((root + "/pipeline", root + "/stages"))]
    if "PagedEngine._decode" in names:
        Path(out).write_text("\\n".join(["GraphSession.run", *names]))
        raise KeyboardInterrupt
    run(session)

GraphSession.run = stop_at_a_decode_step
sys.argv[1:] = arguments
main()
"""
"""Writes the call stack of the first decode step. A fork would lose torch's threads."""


def test_the_path_of_a_command_has_few_files_and_all_exist() -> None:
    section, _, _ = PAGE.partition("## One command: kvgate kv=int8")[2].partition("\n\nA decode step ")
    paths = set(re.findall(r"`([\w/.]+(?:/|\.(?:py|yaml|c)))`", section))
    assert paths
    assert [path for path in paths if not (ROOT / path).is_file()] == []
    assert len(paths) <= MAX_FILES


def test_a_decode_step_passes_the_functions_of_the_page(tmp_path: Path) -> None:
    functions = PAGE.partition("passes these functions")[2].partition("Other engines differ")[0]
    out = tmp_path / "functions"
    few = [*FEW, "workloads.conformance_samples=0", "tracking=none", f"workdir={tmp_path / 'work'}", "kv=int8"]
    command = [sys.executable, "-c", RECORDER, str(out), str(ROOT), *few]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, cwd=tmp_path, timeout=MAX_SECONDS)
    assert out.is_file(), ended.stderr
    names = out.read_text().splitlines()[::-1]
    names = names[names.index("main") + 1 :]
    assert names == re.findall("`([^`]+)`", functions)[1:]
    assert len(names) <= MAX_FRAMES
