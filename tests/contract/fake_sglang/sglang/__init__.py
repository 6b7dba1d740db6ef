"""The part of SGLang that the worker imports. FAKE_SGLANG_MODE selects a misbehaviour."""

import os

MODE = os.environ["FAKE_SGLANG_MODE"]
__version__ = os.environ["FAKE_SGLANG_RELEASE"]
if MODE == "broken install":
    raise ImportError("libcudart.so.13: cannot open shared object file")

import torch  # noqa: E402

from sglang.toy import Engine  # noqa: E402

torch.cuda.device_count = lambda: int(os.environ.get("FAKE_SGLANG_GPUS", "0"))
torch.cuda.get_device_name = lambda _: "NVIDIA H100"
torch.cuda.get_device_capability = lambda _: (9, 0)

__all__ = ["Engine"]
