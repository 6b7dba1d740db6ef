"""Data that all tests of a run share."""

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Create a directory once for all tests, since making it takes seconds. pytest-xdist's processes share the directory."""
    root = factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root
    path, scratch = root / name, root / f"{name}.new"
    with (root / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            shutil.rmtree(scratch, ignore_errors=True)  # left by a process that failed
            make(scratch)
            scratch.rename(path)
    return path
