"""Moves the reference engine's model to a GPU: 16-bit weights if the checkpoint has them, and float32 arithmetic."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from stages.core.errors import MissingRequirement

HALVES = (torch.bfloat16, torch.float16)


def place_model(model: Any, device: torch.device) -> Any:
    """Move a float32 model to a device and return it. On a GPU, products are in float32, never in TF32."""
    if device.type == "cpu":
        return model
    torch.set_float32_matmul_precision("highest")
    with within_memory(device):
        store_in_16_bits(model, device)
        model.to(device)  # the buffers
        torch.cuda.empty_cache()  # the float32 copies
    return model


def store_in_16_bits(model: Any, device: torch.device) -> None:
    """Move weights to a device, in 16 bits if that is lossless. Each module widens its weights while it runs.

    Results equal those with float32 weights, in half the memory plus one module's weights in float32.
    """
    for parameter in model.parameters():
        parameter.data = _narrowest(parameter.data.to(device))
    for module in model.modules():
        stored = {name: weight for name, weight in module._parameters.items() if weight is not None and weight.dtype in HALVES}
        if stored:
            module.register_forward_pre_hook(_widen)
            module.register_forward_hook(partial(_restore, stored), always_call=True)


def _narrowest(x: Tensor) -> Tensor:
    """Return float32 numbers in the first type of HALVES that represents all of them exactly, otherwise unchanged."""
    return next((short for short in map(x.to, HALVES) if torch.equal(short.float(), x)), x)


def _widen(module: torch.nn.Module, _: Any) -> None:
    wide = {name: weight.float() for name, weight in module._parameters.items() if weight is not None}
    module._parameters.update(wide)  # type: ignore[arg-type]  # no gradient is ever taken


def _restore(stored: dict[str, torch.nn.Parameter], module: torch.nn.Module, *_: Any) -> None:
    module._parameters.update(stored)


@contextmanager
def within_memory(device: torch.device) -> Iterator[None]:
    """Raise MissingRequirement if GPU memory runs out: the stress test treats UserError as a refusal by the judged engine."""
    try:
        yield
    except RuntimeError as error:
        # Allocations outside torch, such as a CUDA context or cuBLAS' workspace, raise other classes than OutOfMemoryError.
        if device.type == "cpu" or not any(sign in str(error) for sign in ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED")):
            raise
        raise MissingRequirement(
            "reference.device: the GPU's free memory is too small for the reference engine and the judged engine; lower "
            "backend.gpu_memory_utilization if the backend has it, or set reference.device=cpu"
        ) from None
