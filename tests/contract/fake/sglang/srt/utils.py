"""The device that SGLang would run on."""

import torch


def get_device() -> str:
    if not torch.cuda.device_count():
        raise RuntimeError("No accelerator (CUDA, XPU, HPU, NPU, MUSA, MPS) is available.")
    return "cuda"
