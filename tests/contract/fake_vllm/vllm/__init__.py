"""A vLLM of a few lines, on which our real worker runs: same names, same arguments, toy logits."""

import importlib
import os
from typing import Any

MODE = os.environ.get("FAKE_VLLM_MODE", "sound")
"""How it misbehaves."""

if MODE == "broken install":
    raise ImportError("libc10_cuda.so: cannot open shared object file")

__version__ = os.environ.get("FAKE_VLLM_RELEASE", "0.32.0")
print("INFO vLLM API server version", __version__)  # it prints, and to stdout


def __getattr__(name: str) -> Any:
    if name not in ("LLM", "SamplingParams"):
        raise AttributeError(name)
    return getattr(importlib.import_module("vllm.toy"), name)
