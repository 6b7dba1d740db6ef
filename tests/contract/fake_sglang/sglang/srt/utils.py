"""The device that SGLang would run on."""

import os


def get_device() -> str:
    if os.environ["FAKE_SGLANG_GPUS"] == "0":
        raise RuntimeError("No accelerator (CUDA, XPU, HPU, NPU, MUSA, MPS) is available.")
    return "cuda"
