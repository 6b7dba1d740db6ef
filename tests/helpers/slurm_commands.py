"""Stands in for Slurm's commands: `python slurm_commands.py sbatch FILE` and so on, as `slurm.py` puts them on PATH.

A job's script is read as sbatch reads it, strictly, and runs on this machine: an array of tasks, some at once, each in a
session of its own with the variables of Slurm. What is known of a job lies in the folder
that SLURM_STAND_IN names, a file a task.
"""

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

FOLDER = "SLURM_STAND_IN"
NODE = "node1"
PARTITIONS = ("gpu",)
SIGNALS = {name: getattr(signal, f"SIG{name}") for name in ("INT", "TERM", "KILL", "CONT", "USR1", "USR2")}


class Parser(argparse.ArgumentParser):
    """Refuses as Slurm's commands do."""

    def error(self, message: str) -> NoReturn:
        sys.exit(f"{self.prog}: error: {message}")


def _matches(pattern: str) -> Any:
    def check(value: str) -> str:
        if re.fullmatch(pattern, value) is None:
            raise argparse.ArgumentTypeError(f"invalid value {value!r}")
        return value

    return check


NAMES = _matches(r"[\w.-]+(,[\w.-]+)*")
NUMBER = _matches("[1-9][0-9]*")
MEMORY = _matches(r"[0-9]+([KMGT]B?)?")
TIME = _matches(r"[0-9]+(:[0-9]+){0,2}|[0-9]+-[0-9]+(:[0-9]+){0,2}")

OPTIONS = {  # of sbatch(1)
    "array": _matches(r"[0-9]+(-[0-9]+(:[0-9]+)?)?(,[0-9]+(-[0-9]+)?)*(%[1-9][0-9]*)?"),
    "account": NAMES,
    "constraint": _matches(r"[\w&|*,()\[\]-]+"),
    "cpus-per-gpu": NUMBER,
    "cpus-per-task": NUMBER,
    "error": str,
    "exclude": _matches(r"[\w.,\[\]-]+"),
    "gpus-per-node": _matches(r"(\w+:)?[0-9]+"),
    "gpus-per-task": _matches(r"(\w+:)?[0-9]+"),
    "gres": _matches(r"\w+(:\w+)?(:[0-9]+)?(,\w+(:\w+)?(:[0-9]+)?)*"),
    "job-name": str,
    "mem": MEMORY,
    "mem-per-cpu": MEMORY,
    "mem-per-gpu": MEMORY,
    "nodes": NUMBER,
    "ntasks-per-node": NUMBER,
    "open-mode": _matches("append|truncate"),
    "output": str,
    "partition": NAMES,
    "qos": NAMES,
    "signal": _matches(rf"([BR]+:)?({'|'.join(SIGNALS)})(@[0-9]{{1,5}})?"),
    "time": TIME,
    "wckey": str,
}


def _folder() -> Path:
    return Path(os.environ[FOLDER])


def _read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((_folder() / f"{name}.json").read_text())
    return found


def _write(name: str, **fields: object) -> None:
    scratch = _folder() / f".{name}.{os.getpid()}"
    scratch.write_text(json.dumps(fields))
    scratch.replace(_folder() / f"{name}.json")


def options_of(script: str) -> list[str]:
    """Return the options of a script's #SBATCH lines: those before its first command."""
    found = []
    for number, line in enumerate(script.splitlines()):
        if number == 0 and not line.startswith("#!"):
            sys.exit("sbatch: error: This does not look like a batch script. The first line must start with #!")
        if line.startswith("#SBATCH"):
            found += shlex.split(line.removeprefix("#SBATCH"))
        elif line.strip() and not line.startswith("#"):
            break
    return found


def sbatch(arguments: Sequence[str]) -> None:
    """Queue a script, and start what runs it."""
    parser = Parser("sbatch")
    parser.add_argument("script", type=Path)
    for option, kind in OPTIONS.items():
        parser.add_argument(f"--{option}", type=kind)
    script = Path(arguments[-1])
    asked = parser.parse_args([*options_of(script.read_text()), *arguments])
    if asked.partition is not None and asked.partition not in PARTITIONS:
        print(f"sbatch: error: invalid partition specified: {asked.partition}", file=sys.stderr)
        sys.exit("sbatch: error: Batch job submission failed: Invalid partition name specified")
    if asked.signal is not None and asked.signal.partition(":")[2]:
        sys.exit("sbatch: error: this stand-in signals steps alone")
    job = 1001 + 100 * len(list(_folder().glob("*.sh")))
    kept = _folder() / f"{job}.sh"
    kept.write_text(script.read_text())  # as Slurm, which keeps its own
    values = {name: value for name, value in vars(asked).items() if value is not None and name != "script"}
    _write(str(job), directory=os.getcwd(), **values)
    for task in _tasks(job):
        _write(task, state="PENDING")
    process = subprocess.Popen(
        [sys.executable, __file__, "controller", str(job)],
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=(_folder() / "controller.log").open("a"),
    )
    while process.poll() is None and all(_read(task)["state"] == "PENDING" for task in _tasks(job)):
        time.sleep(0.01)  # as on a busy login node, where jobs start before sbatch has returned
    print(f"Submitted batch job {job}")


def _tasks(job: int) -> list[str]:
    array = _read(str(job)).get("array")
    if array is None:
        return [f"{job}.task"]
    first, last = re.match("([0-9]+)-([0-9]+)", array).groups()  # type: ignore[union-attr]
    return [f"{job}_{index}" for index in range(int(first), int(last) + 1)]


def controller(arguments: Sequence[str]) -> None:
    """Run the tasks of a job, as many at once as it allows."""
    job = int(arguments[0])
    (_folder() / f"controller-{job}.pid").write_text(str(os.getpid()))
    asked, waiting = _read(str(job)), _tasks(job)
    at_once = int((asked.get("array") or "").partition("%")[2] or len(waiting))
    running: dict[str, subprocess.Popen[bytes]] = {}
    while waiting or running:
        while waiting and len(running) < at_once:
            task = waiting.pop(0)
            try:
                running[task] = _run(job, task, asked)
            except FileNotFoundError:  # no folder for its output, of which Slurm says no more than that
                _write(task, state="FAILED")
        time.sleep(0.1)
        for task in [task for task, process in running.items() if process.poll() is not None]:
            code, said = running.pop(task).returncode, _read(task)
            if (_folder() / f"{task}.requeue").exists():
                (_folder() / f"{task}.requeue").unlink()
                _write(task, state="PENDING", restarts=said.get("restarts", 0) + 1)
                waiting.append(task)
            else:
                state = "CANCELLED by 0" if said["state"].startswith("CANCELLED") else "COMPLETED" if code == 0 else "FAILED"
                _write(task, state=state, restarts=said.get("restarts", 0))


def _run(job: int, task: str, asked: dict[str, Any]) -> "subprocess.Popen[bytes]":
    restarts = _read(task).get("restarts", 0)
    index = task.partition("_")[2]
    own = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_") or name == FOLDER}
    own |= {
        "SLURM_JOB_ID": str(job + 1 + int(index) if index else job),
        "SLURM_JOB_NUM_NODES": asked.get("nodes", "1"),
        "SLURM_NTASKS": asked.get("ntasks_per_node", "1"),
        "SLURM_JOB_NODELIST": NODE,
        "SLURM_NODEID": "0",
        "SLURM_OPEN_MODE": asked.get("open_mode", "truncate"),
    }
    if index:
        own |= {"SLURM_ARRAY_JOB_ID": str(job), "SLURM_ARRAY_TASK_ID": index}
    if restarts:
        own["SLURM_RESTART_COUNT"] = str(restarts)
    if "gpus_per_node" in asked:
        own["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(int(asked["gpus_per_node"].rpartition(":")[2]))))
    with open(_file(asked["output"], own), "ab") as out, open(_file(asked["error"], own), "ab") as err:
        process = subprocess.Popen(
            ["bash", str(_folder() / f"{job}.sh")],
            cwd=asked["directory"],
            env=own,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
    _write(task, state="RUNNING", restarts=restarts, session=process.pid)
    return process


def _file(pattern: str, environ: Any = os.environ) -> str:
    values = {
        "%A": environ.get("SLURM_ARRAY_JOB_ID", ""),
        "%a": environ.get("SLURM_ARRAY_TASK_ID", ""),
        "%j": environ["SLURM_JOB_ID"],
        "%t": environ.get("SLURM_PROCID", "0"),
    }
    return re.sub("%[Aajt]", lambda found: values[found[0]], pattern)


def srun(arguments: Sequence[str]) -> None:
    """Become the step of a job: its command, with the variables of its one rank."""
    parser = Parser("srun")
    parser.add_argument("--unbuffered", action="store_true")
    parser.add_argument("--output", required=True)
    parser.add_argument("--error", required=True)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    asked = parser.parse_args(arguments)
    os.environ |= {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_ID": "0"}
    append = os.environ["SLURM_OPEN_MODE"] == "append"
    for stream, pattern in ((1, asked.output), (2, asked.error)):
        flags = os.O_WRONLY | os.O_CREAT | (os.O_APPEND if append else os.O_TRUNC)
        os.dup2(os.open(_file(pattern), flags, 0o644), stream)
    array, job = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ["SLURM_JOB_ID"]
    task = f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}" if array else f"{job}.task"
    (_folder() / f"{task}.step").write_text(str(os.getpid()))
    os.execvp(asked.command[0], asked.command)


def sacct(arguments: Sequence[str]) -> None:
    """Print a line for each task that runs or has run, with its steps, and one for those that wait, as sacct does."""
    parser = Parser("sacct")
    parser.add_argument("-o", "--format", required=True)
    parser.add_argument("--parsable2", action="store_true", required=True)
    parser.add_argument("-j", "--jobs", action="append", required=True)
    asked = parser.parse_args(arguments)
    if asked.format != "JobID,State,NodeList":
        parser.error(f"Invalid field requested: {asked.format}")
    print("JobID|State|NodeList")
    for job in asked.jobs:
        waiting = []
        for task in _tasks(int(job)):
            state, name = _read(task)["state"], task.removesuffix(".task")
            if state == "PENDING" and "_" in name:
                waiting.append(name.partition("_")[2])
                continue
            node = "None assigned" if state == "PENDING" else NODE
            print(f"{name}|{state}|{node}", *([f"{name}.batch|{state}|{node}"] if state != "PENDING" else []), sep="\n")
        if waiting:
            print(f"{job}_[{','.join(waiting)}]|PENDING|None assigned")


def _named(job: str) -> list[str]:
    return [job] if "_" in job else _tasks(int(job))


def scancel(arguments: Sequence[str]) -> None:
    """Cancel tasks, or signal their steps."""
    parser = Parser("scancel")
    parser.add_argument("job")
    parser.add_argument("--signal", "-s")
    asked = parser.parse_args(arguments)
    for task in _named(asked.job):
        said = _read(task)
        if said["state"] != "RUNNING":
            continue
        if asked.signal is not None:
            os.kill(int((_folder() / f"{task}.step").read_text()), SIGNALS[asked.signal.removeprefix("SIG")])
        else:
            _write(task, **{**said, "state": "CANCELLED"})
            os.killpg(said["session"], signal.SIGKILL)


def scontrol(arguments: Sequence[str]) -> None:
    """Let a task wait and run again once it has ended."""
    parser = Parser("scontrol")
    parser.add_argument("verb", choices=["requeue"])
    parser.add_argument("job")
    for task in _named(parser.parse_args(arguments).job):
        (_folder() / f"{task}.requeue").touch()


COMMANDS = {"sbatch": sbatch, "srun": srun, "sacct": sacct, "scancel": scancel, "scontrol": scontrol, "controller": controller}

if __name__ == "__main__":
    COMMANDS[sys.argv[1]](sys.argv[2:])
