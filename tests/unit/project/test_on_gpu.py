"""`make gpu` with parts that pass, fail or hang, tested without a GPU."""

import json
import shlex
import time
from pathlib import Path

import pytest

from benchmarks import on_gpu
from benchmarks.on_gpu import Part, run_step
from benchmarks.recording import ROOT

RUN = f"{on_gpu.PYTHON} -c"
PRINTS = Part("prints", f"""{RUN} "print('right'); print(open('{{out}}/seen', 'w').write('x'))" """, 20)
FAILS = Part("fails", f"""{RUN} "import sys; print('wrong by 3'); sys.exit(1)" """, 20)


def outcomes(out: Path, step: str) -> dict[str, dict[str, object]]:
    return {row["name"]: row for row in json.loads((out / f"{step}.json").read_text())["results"]}


def test_a_hanging_part_is_stopped_and_an_interrupt_keeps_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import subprocess; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); p.wait()"
    monkeypatch.setitem(on_gpu.STEPS, "speed", (Part("hangs", f"{RUN} {shlex.quote(code)}", 3), PRINTS, FAILS))
    started = time.monotonic()

    def interrupt(line: str) -> None:
        if "fails" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_step("speed", tmp_path, interrupt)
    assert time.monotonic() - started < 30
    rows = outcomes(tmp_path, "speed")
    assert (rows["hangs"]["status"], rows["hangs"]["detail"]) == ("FAIL", "longer than 3 s")
    assert rows["prints"]["status"] == "PASS"
    assert "fails" not in rows
    output = rows["hangs"]["output"]
    assert isinstance(output, list)
    status = Path(f"/proc/{output[0]}/status")
    assert not status.exists() or "zombie" in status.read_text()


def test_the_command_of_every_part_is_valid() -> None:
    from benchmarks.attention_peers import KERNELS
    from benchmarks.decode_attention import parser
    from pipeline.config.compose import plan

    known = {kernel.name for kernel in KERNELS}
    for part in (part for parts in on_gpu.STEPS.values() for part in parts):
        command = shlex.split(part.command)
        if "benchmarks.decode_attention" in command:
            arguments = parser().parse_args(command[3:])
            assert set(arguments.kernels) <= known, part.name
            assert arguments.json.name.endswith(".json")
        if "pipeline" in command:
            assert plan([word.replace("{out}", "out") for word in command[3:]], multirun=False).jobs
        for word in command:
            if word.startswith("tests/"):
                assert (ROOT / word).is_file(), word
        assert part.seconds < on_gpu.STEP_SECONDS
