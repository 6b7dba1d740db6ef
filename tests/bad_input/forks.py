"""Runs the command line in forks of one process that has imported it and nothing heavy.

A fork is as fresh as a new process: it has its own modules, environment, limits and user, and may hang or die. It takes
milliseconds where a new interpreter takes a second. Requests and answers are lines of JSON on stdin and stdout.
"""

import ctypes
import json
import os
import resource
import select
import signal
import sys
import tempfile
import traceback
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from composed_once import compose_once

from pipeline.__main__ import main
from pipeline.config.compose import plan

HEAVY = ("torch", "transformers", "tokenizers", "onnxruntime", "onnx", "mlflow", "modelopt", "pandas")
LIGHT = (
    "jinja2.sandbox",
    "pipeline.run.inputs",
    "pipeline.terminal.progress",
    "rich.live",
    "rich.table",
    "stages.engines.onnx.backend",
    "stages.engines.oracle.backend",
    "stages.evaluate.inputs.samples",
    "stages.evaluate.inputs.tokens",
)
MEMORY = 6 << 30
"""Of a fork, in bytes of addresses: input that asks for more is not limited by what reads it."""


CAPABILITY_VERSION = 0x20080522


def drop_capabilities() -> None:
    """Let permissions hold for root as well, who owns the files of the tests."""
    header, none = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)()
    if ctypes.CDLL(None, use_errno=True).capset(header, none):
        raise OSError(ctypes.get_errno(), "capset")


def no_runner() -> ModuleType:
    """Return what stands in for the stages: what is refused before any work does not come here."""

    def begin(*_: object, **__: object) -> NoReturn:
        print("the work began")
        raise SystemExit(99)

    runner = ModuleType("pipeline.run.runner")
    vars(runner).update(run=begin, holding=begin)
    return runner


def child(request: dict[str, Any], scratch: Path) -> NoReturn:
    """Run the command line as the request says; leaves its streams and the heavy modules that it imported in `scratch`."""
    code: object = 1
    try:
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(scratch / name, os.O_WRONLY | os.O_CREAT), number)
            setattr(sys, name, open(number, "w", encoding="utf-8", closefd=False))  # noqa: SIM115 - pytest's own is another file
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        modules = os.open(scratch / "modules", os.O_WRONLY | os.O_CREAT)
        os.chdir(request["directory"])
        for name, value in request["environment"].items():
            os.environ[name] = value
        if request["file_bytes"] is not None:  # a write beyond it fails with EFBIG, as on a disk that is full
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (request["file_bytes"],) * 2)
        if request["limited"]:
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        if request["unprivileged"]:
            drop_capabilities()
        if not request["begins"]:
            sys.modules["pipeline.run.runner"] = no_runner()
        sys.argv = ["kvgate", *request["arguments"]]
        try:
            code = main()
        except SystemExit as error:
            code = error.code
        os.write(modules, json.dumps([name for name in HEAVY if name in sys.modules]).encode())
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Run a request in a fork; `code` is None where it took longer than it may."""
    with tempfile.TemporaryDirectory() as scratch:
        pid = os.fork()
        if pid == 0:
            child(request, Path(scratch))
        handle = os.pidfd_open(pid)
        ended, _, _ = select.select([handle], [], [], request["seconds"])
        if not ended:
            os.kill(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
        os.close(handle)
        texts = {name: (Path(scratch) / name) for name in ("stdout", "stderr", "modules")}
        read = {name: path.read_text(errors="replace") if path.exists() else "" for name, path in texts.items()}
        return {
            "code": os.waitstatus_to_exitcode(status) if ended else None,
            "stdout": read["stdout"],
            "stderr": read["stderr"],
            "heavy": json.loads(read["modules"] or "[]"),
        }


def serve() -> None:
    """Answer requests until stdin ends."""
    compose_once()
    # What commands load once, and no fork has to load again.
    plan([], multirun=False)
    for module in LIGHT:
        import_module(module)
    assert not set(HEAVY) & set(sys.modules), "the process of the forks is light"
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    serve()
