"""Memory of this process: collecting it, and returning it to the system."""

import ctypes
import gc
import sys
from typing import Any

GIB = 1 << 30

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's `mallopt`."""


def return_large_blocks() -> None:
    """Make the C library return blocks of at least 8 MiB to the system when they are freed.

    By default glibc raises this threshold up to 32 MiB and keeps gaps; loading engines in turn then peaks 0.3 GB higher.
    """
    _libc("mallopt", M_MMAP_THRESHOLD, 8 << 20)
    _libc("mallopt", M_TRIM_THRESHOLD, 64 << 20)


def collect_memory() -> None:
    """Collect reference cycles, such as models and graphs, and return the freed memory of the C library and torch."""
    gc.collect()
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    return_freed()


def return_freed() -> None:
    _libc("malloc_trim", 0)


def _libc(name: str, *numbers: int) -> None:
    function = getattr(ctypes.CDLL(None), name, None)
    if function is not None:
        function(*numbers)
