"""Resolves backend.device of backend=torch on this machine, and reports missing requirements."""

from importlib.util import find_spec

import torch

from stages.core.errors import MissingRequirement

OLDEST = 8
"""Lowest major compute capability that the kernels compile for."""


def resolve_device(device: str) -> torch.device:
    """Return the device for backend.device (`auto`, `cpu` or `cuda`); `auto` means cuda if torch finds a GPU.

    Raises MissingRequirement if the GPU is missing or unusable.
    """
    available = torch.cuda.is_available()
    if device == "cpu" or (device == "auto" and not available):
        return torch.device("cpu")
    if torch.version.cuda is None:
        raise MissingRequirement(
            f"backend.device=cuda needs a torch that is built for CUDA, this one is {torch.__version__}: install one "
            "from https://download.pytorch.org/whl/cu130, or set backend.device=cpu"
        )
    if not available:
        raise MissingRequirement(f"backend.device={device}: torch finds no NVIDIA GPU here; set backend.device=cpu")
    if find_spec("triton") is None:
        raise MissingRequirement(
            f"backend.device={device} needs triton, which is not installed here: pip install 'kvgate[kernels]', or set "
            "backend.device=cpu"
        )
    major, minor = torch.cuda.get_device_capability()
    if major < OLDEST:
        raise MissingRequirement(
            f"backend.device={device} needs a GPU of compute capability {OLDEST}.0 or newer, {torch.cuda.get_device_name()} "
            f"has {major}.{minor}; set backend.device=cpu"
        )
    return torch.device("cuda", torch.cuda.current_device())
