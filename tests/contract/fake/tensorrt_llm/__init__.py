"""A small fake TensorRT-LLM that runs our real worker: same names, same arguments, same pitfalls, toy logits."""

import importlib
import os
from typing import Any

from tensorrt_llm.facts import MODE

if MODE == "broken install":
    raise ImportError("libth_common.so: cannot open shared object file")

__version__ = os.environ.get("FAKE_RELEASE", "1.2.1")
print("[TensorRT-LLM] TensorRT LLM version:", __version__)  # the real package prints this to stdout


def __getattr__(name: str) -> Any:
    """Import the remaining names on first use: only the computing toy needs numpy."""
    homes = {"LLM": "tensorrt_llm.served", "SamplingParams": "tensorrt_llm.toy"}
    if name not in homes:
        raise AttributeError(name)
    return getattr(importlib.import_module(homes[name]), name)
