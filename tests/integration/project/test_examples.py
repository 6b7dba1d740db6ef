"""The example CI workflow (tests/long/test_commands.py runs it), the conversion of BFCL, and `make gpu` without a GPU."""

import json
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks import on_gpu
from benchmarks.on_gpu import Part, run_step
from pipeline.config.compose import plan
from stages.evaluate.inputs.checks import judge as judge_answer
from stages.evaluate.inputs.samples import read_jsonl

ROOT = Path(__file__).resolve().parents[3]
WORKFLOW = (ROOT / "examples" / "ci" / "github-actions.yml").read_text(encoding="utf-8")
JOB: dict[str, Any] = yaml.safe_load(WORKFLOW)
STEPS: list[dict[str, Any]] = JOB["jobs"]["promote"]["steps"]
GPU: dict[str, Any] = JOB["jobs"]["vllm"]


def test_a_refusal_stops_the_ci_job_and_actions_are_pinned() -> None:
    """GitHub runs `bash -e`, and runs a step without `always()` only if the earlier steps succeeded."""
    assert [step["name"] for step in STEPS if "name" in step and "always()" in step.get("if", "")] == ["Step summary"]
    assert "continue-on-error" not in WORKFLOW
    assert JOB["permissions"] == {"contents": "read"}
    used = re.findall(r"uses: (\S+)", WORKFLOW)
    assert used
    assert all(re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40}", action) for action in used)
    assert not any("${{" in step.get("run", "") for step in STEPS + GPU["steps"]), "an expression in a script runs as code"


def test_only_the_protected_environment_has_secrets_and_promotes() -> None:
    assert "secrets" not in json.dumps({key: part for key, part in JOB.items() if key != "jobs"})
    for name, job in JOB["jobs"].items():
        text, protected = json.dumps(job), name != "judge"
        assert ("secrets." in text, "stage=promote" in text, job.get("environment") == "production") == (protected,) * 3
        assert ("github.ref == 'refs/heads/main'" in job["if"]) == protected


def test_the_gpu_job_judges_and_promotes_as_the_tutorial_does(tmp_path: Path) -> None:
    values = {**JOB["env"], **GPU["env"], "HOME": str(tmp_path), "SIGNING": "", "TRUSTED": ""}
    commands = [step["run"] for step in GPU["steps"] if step.get("run", "").startswith("kvgate ")]
    judge, promote, rollback = (
        re.sub(r"\$(\w+)", lambda name: str(values[name[1]]), command).split()[1:] for command in commands
    )
    jobs = plan([part for part in judge if part != "-m"], multirun=True).jobs
    page = (ROOT / "docs" / "serve-8b.md").read_text(encoding="utf-8")
    (documented, *_) = re.findall(r"^kvgate (experiment=vllm .*) dry=true$", page, re.MULTILINE)
    (tutorial,) = plan(documented.split(), multirun=False).jobs
    for key in ("model", "kv", "workloads"):
        assert getattr(jobs[0], key) == getattr(tutorial, key)
    own = {"python": None}
    assert jobs[0].backend.model_copy(update=own) == tutorial.backend.model_copy(update=own)
    for changed in (plan(promote, multirun=False).jobs[0], plan(rollback, multirun=False).jobs[0]):
        assert changed.stage in ("promote", "rollback")
        for key in ("model", "work", "tracking", "gates"):
            assert getattr(changed, key) == getattr(jobs[0], key)
    assert GPU["if"].startswith("${{ vars.KVGATE_GPU == 'true'")
    assert {"Judge", "Promote", "Try the champion", "Roll back"} <= {step.get("name") for step in GPU["steps"]}
    assert {"Judge", "Promote", "Try the champion", "Roll back"} <= {step.get("name") for step in STEPS}


def test_calls_of_bfcl_are_converted_to_questions(tmp_path: Path) -> None:
    """Three of five are skipped: two calls, an object, and no value for a required argument."""
    area = {"name": "area", "description": "", "parameters": {"properties": {}, "required": ["base", "height"]}}
    side = {"name": "side", "description": "", "parameters": {"properties": {}, "required": ["base"]}}
    right = {"area": {"base": [10, 10.0], "height": [5], "unit": ["units", ""]}}
    possible: list[list[dict[str, Any]]] = [
        [right],
        [right, right],
        [{"area": {"base": [{"x": [1]}], "height": [5]}}],
        [{"area": {"base": [""], "height": [5]}}],
        [{"area": {"base": ["", 2], "height": [5]}}],
    ]
    entries = [{"id": f"c_{i}", "question": [[{"role": "user", "content": "?"}]], "function": [area, side]} for i in range(5)]
    answers = [{"id": f"c_{i}", "ground_truth": calls} for i, calls in enumerate(possible)]
    for folder, rows in ((tmp_path, entries), (tmp_path / "possible_answer", answers)):
        folder.mkdir(exist_ok=True)
        (folder / "BFCL_v4_c.json").write_text("\n".join(map(json.dumps, rows)))
    script, out = ROOT / "examples" / "bfcl_questions.py", tmp_path / "questions.jsonl"
    command: list[str | Path] = [sys.executable, script, out, "--categories", "c", "--data"]
    subprocess.run([*command, tmp_path], check=True)
    samples = {sample.id: sample for sample in read_jsonl(out, set())}
    assert {name: json.loads(sample.reference)["arguments"] for name, sample in samples.items()} == {
        "c_0": {"base": 10, "height": 5},
        "c_4": {"base": 2, "height": 5},
    }
    assert judge_answer(samples["c_0"], '{"name": "area", "arguments": {"height": 5, "base": 10}}')
    assert not judge_answer(samples["c_0"], '{"name": "side", "arguments": {"base": 10}}')
    refused = subprocess.run([*command, tmp_path / "none"], capture_output=True, text=True, check=False)
    assert (refused.returncode, refused.stderr.count("\n")) == (1, 1)
    assert "give --data DIR" in refused.stderr


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
