"""Runs command lines in forks of one process that has imported the command line but no slow library.

A fork is as isolated as a new process: it has its own modules, environment, limits and user, and may hang or die. It starts
in milliseconds, while a new interpreter takes a second. Requests and answers are lines of JSON on stdin and stdout.
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

from helpers.commands.cached_hydra import compose_once

from pipeline.__main__ import main
from pipeline.config.compose import plan

HEAVY = ("torch", "transformers", "tokenizers", "onnxruntime", "onnx", "mlflow", "modelopt", "pandas")
LIGHT = (
    "jinja2.sandbox",
    "pipeline.chain.inputs",
    "rich.live",
    "rich.table",
    "stages.engines.cuda.backend",
    "stages.engines.onnx.backend",
    "stages.evaluate.inputs.samples",
    "stages.evaluate.inputs.tokens",
)
MEMORY = 6 << 30
"""Limit on a fork's address space in bytes. Input that exceeds it shows that its reader has no limit."""


CAPABILITY_VERSION = 0x20080522


def drop_capabilities() -> None:
    """Drop root's capabilities, so that file permissions apply. The test files belong to root."""
    header, none = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)()
    if ctypes.CDLL(None, use_errno=True).capset(header, none):
        raise OSError(ctypes.get_errno(), "capset")


def no_runner() -> ModuleType:
    """Return a replacement of the runner that fails: bad input must be refused before any work."""

    def begin(*_: object, **__: object) -> NoReturn:
        print("the work began")
        raise SystemExit(99)

    runner = ModuleType("pipeline.chain.runner")
    vars(runner).update(run=begin, holding=begin)
    return runner


def child(request: dict[str, Any], scratch: Path) -> NoReturn:
    """Run a request's command line; leave its output and the list of imported slow modules in `scratch`."""
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
        if request["file_bytes"] is not None:  # A larger write fails with EFBIG, as on a full disk.
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (request["file_bytes"],) * 2)
        if request["limited"]:
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        if request["unprivileged"]:
            drop_capabilities()
        if not request["begins"]:
            sys.modules["pipeline.chain.runner"] = no_runner()
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
    """Run a request in a fork; `code` is None after a timeout."""
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
    # Load modules and files used by every command, so that forks inherit them.
    plan([], multirun=False)
    for module in LIGHT:
        import_module(module)
    assert not set(HEAVY) & set(sys.modules), "the process of the forks is light"
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    serve()
