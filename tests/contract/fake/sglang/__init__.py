"""The part of SGLang that the worker imports. FAKE_MODE selects a misbehaviour."""

import os

MODE = os.environ["FAKE_MODE"]
__version__ = os.environ["FAKE_RELEASE"]
if MODE == "broken install":
    raise ImportError("libcudart.so.13: cannot open shared object file")

from sglang.toy import Engine  # noqa: E402

__all__ = ["Engine"]
