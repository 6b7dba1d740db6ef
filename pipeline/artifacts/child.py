"""Runs a function in a process of its own, which takes along what its libraries keep of memory, of a GPU's as well."""

import ctypes
import multiprocessing
import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from pipeline.core.records import Progress

PR_SET_PDEATHSIG = 1
"""Of <sys/prctl.h>: Linux sends the child a signal when its parent dies, however that happens."""


def in_child(function: Callable[..., None], *paths: Path, progress: Progress, **options: Any) -> None:
    """Call a function of a module, with its progress shown and its exception raised here.

    Raises RuntimeError where the process ends without a word, killed for memory for example.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_call, args=(theirs, function, paths, options), daemon=True)
    child.start()
    theirs.close()
    try:
        while (said := ours.recv()) is not None:
            if isinstance(said, Exception):
                raise said
            progress(*said)
    except EOFError:
        child.join()
        raise RuntimeError(f"{function.__name__}: its process ended with exit code {child.exitcode}") from None
    finally:
        child.terminate()
        child.join()


def _call(pipe: Connection, function: Callable[..., None], paths: tuple[Path, ...], options: dict[str, Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends this process
    if hasattr(libc := ctypes.CDLL(None), "prctl"):
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    said = None
    try:
        function(*paths, progress=lambda *told: pipe.send(told), **options)
    except Exception as error:
        error.add_note(traceback.format_exc())  # of which pickling keeps nothing
        said = error
    pipe.send(said)
