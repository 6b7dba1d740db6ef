"""Cases of bad input, and forks of one process that run command lines. The process has imported no slow library.

A fork is as isolated as a new process: it has its own modules, environment, limits and user, and may hang or crash. It starts
in milliseconds, whereas a new interpreter takes a second.
"""

import ctypes
import hashlib
import json
import os
import resource
import signal
import stat
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

from helpers.commands.cached_hydra import compose_once

from pipeline.__main__ import main
from pipeline.config.compose import plan

ROOT = Path(__file__).resolve().parents[2]


def prepare_nothing(_: Path) -> None:
    """Create no files."""


@dataclass(frozen=True)
class BadInput:
    """Bad input: a command line, and the files in its directory."""

    name: str
    arguments: tuple[str, ...]
    expected: tuple[str, ...]
    """Texts that stderr must contain: the key or file, the value, and the words that identify the problem."""
    prepare: Callable[[Path], object] = prepare_nothing
    """Creates the files in the command's directory."""
    code: int = 2
    """Exit code."""
    runs_stage: bool = False
    """Whether the stage starts and finds the error itself, because it reads results of earlier commands."""
    loads_model: bool = False
    """Whether the error is found only after a library has read a file of the model."""
    environment: Mapping[str, str] = field(default_factory=dict)
    unprivileged: bool = False
    """Whether to drop root's privileges, so that file permissions apply."""
    file_bytes: int | None = None
    """Maximum size in bytes of a written file, to simulate a full disk."""


@dataclass(frozen=True)
class CommandResult:
    """Result of a command."""

    code: int | None
    """Exit code; None if the command was stopped after a timeout."""
    stdout: str
    stderr: str
    heavy: tuple[str, ...]
    """Slow-to-import libraries that the command imported."""


def contents(directory: Path) -> dict[str, str]:
    """Return the contents of a directory: relative path -> mode, and digest, size or link target."""
    files = {}
    for path in sorted(directory.rglob("*")):
        mode = path.lstat().st_mode
        if stat.S_ISREG(mode):
            size = path.stat().st_size
            content = hashlib.sha256(path.read_bytes()).hexdigest() if size < 1 << 26 else f"{size} bytes"
        else:
            content = os.readlink(path) if stat.S_ISLNK(mode) else ""
        files[str(path.relative_to(directory))] = f"{stat.filemode(mode)} {content}"
    return files


HEAVY = ("torch", "transformers", "tokenizers", "onnxruntime", "onnx", "mlflow", "modelopt", "pandas")
LIGHT = (
    "jinja2.sandbox",
    "pipeline.chain.inputs",
    "rich.live",
    "rich.table",
    "stages.engines.torch.backend",
    "stages.engines.onnx.backend",
    "stages.evaluate.inputs.samples",
    "stages.evaluate.inputs.tokens",
)
MEMORY = 6 << 30
"""Limit on a fork's address space in bytes. A reader without a limit of its own exceeds it on large input."""

CAPABILITY_VERSION = 0x20080522


def drop_capabilities() -> None:
    """Drop root's capabilities, so that file permissions apply. The test files belong to root."""
    header, none = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)()
    if ctypes.CDLL(None, use_errno=True).capset(header, none):
        raise OSError(ctypes.get_errno(), "capset")


def fail(*_: object) -> NoReturn:
    """Fail instead of `pipeline.chain.command.run`, because kvgate must refuse bad input before the call."""
    print("the command was run")
    raise SystemExit(99)


def run_child(case: BadInput, directory: Path, scratch: Path, *, limited: bool) -> NoReturn:
    """Run a case's command line in the child process; write its output and the names of imported slow modules to `scratch`."""
    code: object = 1
    try:
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(scratch / name, os.O_WRONLY | os.O_CREAT), number)
            setattr(sys, name, open(number, "w", encoding="utf-8", closefd=False))  # noqa: SIM115 - pytest's own is another file
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        modules = os.open(scratch / "modules", os.O_WRONLY | os.O_CREAT)
        os.chdir(directory)
        os.environ.update(case.environment)
        if case.file_bytes is not None:  # A larger write fails with EFBIG, as on a full disk.
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (case.file_bytes,) * 2)
        if limited:
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        if case.unprivileged:
            drop_capabilities()
        if not (case.runs_stage or case.loads_model):
            sys.modules["pipeline.chain.command"] = SimpleNamespace(run=fail)  # type: ignore[assignment]
        sys.argv = ["pipeline", *case.arguments]
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


def run_in_fork(case: BadInput, directory: Path, seconds: float = 60, *, limited: bool = True) -> CommandResult:
    """Run a case's command in a directory, in a fork of this process. A hanging command is stopped after `seconds`."""
    with tempfile.TemporaryDirectory() as scratch:
        child = get_context("fork").Process(
            target=run_child, args=(case, directory, Path(scratch)), kwargs={"limited": limited}
        )
        child.start()
        child.join(seconds)
        code = child.exitcode
        child.kill()
        child.join()
        texts = [Path(scratch, name) for name in ("stdout", "stderr", "modules")]
        stdout, stderr, modules = (path.read_text(errors="replace") if path.exists() else "" for path in texts)
        return CommandResult(code, stdout, stderr, tuple(json.loads(modules or "[]")))


def load_light() -> None:
    """Load the modules and files that every command uses, so that forks inherit them."""
    os.environ.pop("MLFLOW_TRACKING_URI", None)
    os.environ["OMP_NUM_THREADS"] = "1"
    compose_once()
    plan([], multirun=False)
    for module in LIGHT:
        import_module(module)
    assert not set(HEAVY) & set(sys.modules), "forks would inherit a slow library"


RunCase = Callable[[BadInput, Path], CommandResult]
"""A function that runs a case's command in a directory."""


@contextmanager
def fork_commands() -> Iterator[RunCase]:
    """Yield a function that runs commands in forks of a new light process, which ends with the block."""
    with ProcessPoolExecutor(1, get_context("spawn"), load_light) as light:

        def run(case: BadInput, directory: Path) -> CommandResult:
            if case.loads_model:  # the test process has already imported the slow libraries that the case needs
                import_module("transformers.modeling_gguf_pytorch_utils")
                return run_in_fork(case, directory)
            return light.submit(run_in_fork, replace(case, prepare=prepare_nothing), directory).result()

        yield run
