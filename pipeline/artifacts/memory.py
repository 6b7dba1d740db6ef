"""The most memory that this process took while something ran, as Linux counts it; elsewhere nothing tells."""

import re
from contextlib import suppress
from pathlib import Path

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
HIGHEST = re.compile(r"^VmHWM:\s*(\d+) kB$", re.MULTILINE)


def forget_peak() -> None:
    """Begin to count again. Where the system does not let a process do that, `peak_bytes` is that of all its time."""
    with suppress(OSError):
        RESET.write_text("5")


def peak_bytes() -> int | None:
    """Return the most resident memory of this process since `forget_peak`, in bytes; None where the system does not say.

    It is that of the whole process: libraries and what was loaded before count, child processes and GPUs do not.
    """
    try:
        found = HIGHEST.search(STATUS.read_text(encoding="utf-8"))
    except OSError:
        return None
    return int(found[1]) * 1024 if found is not None else None
