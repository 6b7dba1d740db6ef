"""As much of SGLang as the worker imports; FAKE_SGLANG_MODE says how it misbehaves."""

import os

MODE = os.environ["FAKE_SGLANG_MODE"]
__version__ = os.environ["FAKE_SGLANG_RELEASE"]
if MODE == "broken install":
    raise ImportError("libcudart.so.13: cannot open shared object file")

from sglang.toy import Engine  # noqa: E402

__all__ = ["Engine"]
