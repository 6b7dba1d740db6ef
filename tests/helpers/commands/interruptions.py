"""Faults at the k-th operation of a process.

An operation is a write, rename, link or removal below a folder, or a change of a run's state. The faults are injected in a
forked child: an audit hook (PEP 578) sees each of Python's file system calls in advance, and can fail the call or end the
process. The hook does not see SQLite's own writes, so each writing call of MLflow's client counts as
one operation.
"""

import errno
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mlflow import MlflowClient

FORK = multiprocessing.get_context("fork")
"""Fork context: children inherit all imported libraries."""

Fault = Literal["SIGKILL", "SIGTERM", "ENOSPC", "EIO"]
FAULTS: tuple[Fault, ...] = ("SIGKILL", "SIGTERM", "ENOSPC", "EIO")

CHANGES = {"os.rename": 1, "os.link": 1, "os.mkdir": 0, "os.remove": 0, "os.rmdir": 0, "os.chmod": 0, "shutil.copyfile": 1}
"""Audit event -> index of the argument that holds the changed path."""
STATES = [name for name in dir(MlflowClient) if name.startswith(("create_", "delete_", "finalize_", "log_", "set_", "update_"))]
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


@dataclass
class Attempt:
    """Outcome of a child process."""

    code: int
    """Exit code: 0, 1 after an exception, 130 after an interrupt, or -N if signal N killed the child."""
    operations: int
    """Number of operations performed. With a fault at k: at least k, unless the run had fewer."""
    traceback: str
    """Traceback of the exception."""
    returned: Any = None
    """Result of the job."""


class _Seam:
    def __init__(self, folder: Path, at: int | None, fault: Fault) -> None:
        self._folder, self._at, self._fault, self.count = folder, at, fault, 0

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            if isinstance(flags, int) and flags & WRITES:
                self._below(path)
        elif event in CHANGES:
            self._below(arguments[CHANGES[event]])

    def _below(self, path: object) -> None:
        if isinstance(path, str | bytes | os.PathLike) and Path(os.fsdecode(path)).is_relative_to(self._folder):
            self.operation()

    def operation(self) -> None:
        self.count += 1
        if self.count != self._at:
            return
        if self._fault in ("SIGKILL", "SIGTERM"):
            os.kill(os.getpid(), signal.Signals[self._fault])
        else:
            code = getattr(errno, self._fault)
            raise OSError(code, os.strerror(code))


def _child(job: Callable[[], object], folder: Path, at: int | None, fault: Fault, results: Any) -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like the command line
    seam, code, output, returned = _Seam(folder, at, fault), 0, "", None

    def counted(name: str) -> Callable[..., Any]:
        method = getattr(MlflowClient, name)

        def call(*arguments: Any, **options: Any) -> Any:
            seam.operation()
            return method(*arguments, **options)

        return call

    for name in STATES:
        setattr(MlflowClient, name, counted(name))
    sys.addaudithook(seam.hook)
    try:
        returned = job()
    except KeyboardInterrupt:
        code = 130
    except BaseException:
        code, output = 1, traceback.format_exc()
    results.send((seam.count, output, returned))
    os._exit(code)


def attempt(job: Callable[[], object], folder: Path, at: int | None = None, fault: Fault = "SIGKILL") -> Attempt:
    """Run a job in a child process, with a fault at operation number `at`, or without a fault if `at` is None."""
    receive, send = FORK.Pipe(duplex=False)
    child = FORK.Process(target=_child, args=(job, folder, at, fault, send))
    child.start()
    send.close()
    # A whole pipeline takes a minute. The pipe of a killed child is at its end, so poll returns at once.
    if not receive.poll(600):
        child.kill()
        raise AssertionError("the child hangs")
    try:
        operations, output, returned = receive.recv()
    except EOFError:
        operations, output, returned = at or 0, "", None
    child.join(120)
    assert child.exitcode is not None, "the child hangs"
    return Attempt(child.exitcode, operations, output, returned)
