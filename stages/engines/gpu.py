"""Answers which NVIDIA GPU torch can use, and on which device an engine runs. Importing the module does not import torch."""

from importlib.util import find_spec
from typing import NamedTuple

from stages.core.errors import MissingRequirement

MIN_BYTES = 100_000_000
"""Minimum bytes of weights for which `reference.device=auto` selects a GPU: 50 million parameters in 16 bits. For a smaller
model, launching kernels takes longer than computing on a CPU."""
OLDEST = 8
"""Lowest major compute capability that the kernels compile for."""


class Gpu(NamedTuple):
    name: str
    capability: str
    """Compute capability, such as `9.0`."""


def find_gpu() -> Gpu | None:
    """Return CUDA's current GPU; None if torch cannot use an NVIDIA GPU."""
    import torch

    if torch.version.cuda is None or not torch.cuda.is_available():
        return None
    return Gpu(torch.cuda.get_device_name(), "{}.{}".format(*torch.cuda.get_device_capability()))


def require_gpu(key: str, fix: str) -> Gpu:
    """Return CUDA's current GPU. Raises MissingRequirement, with `key` and `fix` in the message, if torch cannot use a GPU."""
    import torch

    gpu = find_gpu()
    if gpu is None:
        raise MissingRequirement(
            f"{key}: torch {torch.__version__} finds no NVIDIA GPU here; {fix}. On a machine with a GPU, install a CUDA build "
            "of torch (pip install torch --index-url https://download.pytorch.org/whl/cu130)"
        )
    return gpu


def gpu_identity() -> dict[str, object]:
    gpu = require_gpu("device=cuda", "choose device=cpu")
    return {"device": "cuda", "gpu": gpu.name, "compute_capability": gpu.capability}


def reference_device(device: str, weight_bytes: int) -> str:
    """Return `cpu` or `cuda` for `reference.device`; `auto` means cuda if torch finds a GPU and the weights are not tiny.

    Raises MissingRequirement if `device` is `cuda` and torch finds no GPU.
    """
    if device == "cuda":
        require_gpu("reference.device=cuda", "set reference.device=auto, which then uses the CPU")
        return "cuda"
    return "cuda" if device == "auto" and weight_bytes >= MIN_BYTES and find_gpu() else "cpu"


def resolve_device(device: str) -> str:
    """Return `cpu` or `cuda` for `backend.device`. Raises MissingRequirement if the GPU is missing or unusable."""
    if device == "cpu" or (device == "auto" and find_gpu() is None):
        return "cpu"
    key, fix = f"backend.device={device}", "set backend.device=cpu"
    gpu = require_gpu(key, fix)
    if find_spec("triton") is None:
        raise MissingRequirement(f"{key} needs triton, which is not installed here: pip install 'triton>=3.6,<3.8', or {fix}")
    if int(gpu.capability.partition(".")[0]) < OLDEST:
        needs = f"a GPU of compute capability {OLDEST}.0 or newer, {gpu.name} has {gpu.capability}"
        raise MissingRequirement(f"{key} needs {needs}; {fix}")
    return "cuda"
