"""Runs a function in a child process. When the process ends, the memory of its libraries is freed, including GPU memory."""

import ctypes
import gc
import os
import pickle
import signal
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stages.core.errors import MissingRequirement, Refusal
from stages.core.records import Progress
from stages.core.streams import redact_output

PR_SET_PDEATHSIG = 1
"""Option of `prctl` from <sys/prctl.h>: Linux sends the child a signal if its parent dies in any way."""


def die_with_parent() -> None:
    """Let Linux kill this process when its parent dies. Other systems do not support this."""
    if hasattr(libc := ctypes.CDLL(None), "prctl"):
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def signal_name(number: int) -> str:
    """Return a signal's name. Python names no real-time signals."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def run_in_child(function: Callable[..., None], *paths: Path, progress: Progress, **options: Any) -> None:
    """Call a module's function in a child process, show its progress, and raise its exception here.

    The child starts with an empty `__main__`, because the caller's may be a script that calls kvgate. Its output goes to
    stderr, because stdout is for results. Signals to the caller's process group do not reach the child. Raises
    MissingRequirement if the child is killed, RuntimeError if it exits early.
    """
    reading, writing = os.pipe()
    begin = f"import sys; sys.path[:] = {sys.path!r}; from stages.core.child import main"
    quiet = ["-Wignore"] if warnings.filters[:1] == [("ignore", None, Warning, None, 0)] else []  # set by log=quiet
    command = [sys.executable, *quiet, "-c", f"{begin}; main({writing}, {os.getpid()})"]
    with (
        open(reading, "rb") as answers,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=2, pass_fds=[writing], start_new_session=True) as child,
    ):
        os.close(writing)
        assert child.stdin is not None
        try:
            with child.stdin as calls:
                pickle.dump((function, paths, options), calls)
            while (answer := pickle.load(answers)) is not None and not isinstance(answer, Exception):
                progress(*answer)
        except (EOFError, BrokenPipeError):
            exit_code = child.wait()
            answer = RuntimeError(f"{function.__name__}: its process ended with exit code {exit_code}")
            if exit_code < 0:
                name = signal_name(-exit_code)
                answer = MissingRequirement(
                    f"{function.__name__}: its process was killed ({name}): out of memory? free some memory, or run fewer jobs "
                    "at once"
                )
        except BaseException:  # Ctrl-C
            child.terminate()
            raise
    if answer is not None:
        raise answer


def main(writing: int, parent: int) -> None:
    """Run in the child: read a call from stdin, and write progress, then None or the exception, to descriptor `writing`."""
    die_with_parent()
    if os.getppid() != parent:
        return
    gc.set_threshold(100_000)  # tracing makes a million objects, and almost no garbage
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that its temporary files are removed
    redact_output()
    try:
        with open(writing, "wb", buffering=0) as answers:
            function, paths, options = pickle.load(sys.stdin.buffer)
            try:
                function(*paths, progress=lambda *update: answers.write(pickle.dumps(update)), **options)
                answers.write(pickle.dumps(None))
            except Exception as error:
                answers.write(_pickled_error(error))
    except KeyboardInterrupt:
        sys.exit(130)


def _pickled_error(error: Exception) -> bytes:
    """Pickle an exception. A defect gets its traceback as a note, because pickling drops the traceback."""
    if isinstance(error, Refusal):
        return pickle.dumps(error)
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # some libraries' exceptions cannot be unpickled
        error = RuntimeError(f"{type(error).__name__}: {error}")
    error.add_note(traceback.format_exc())
    return pickle.dumps(error)
