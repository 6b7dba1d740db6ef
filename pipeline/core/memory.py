"""Memory that nothing uses any more goes back to the system."""

import ctypes
import gc


def give_back() -> None:
    """Collect cycles, as models and graphs are, and return to the system what the C library would keep for itself."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
