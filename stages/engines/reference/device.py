"""Resolves `reference.device`, and `backend.device` of backend=torch, on this machine. Importing the module is cheap."""

from importlib.util import find_spec

from stages.core.errors import MissingRequirement

MIN_BYTES = 100_000_000
"""Minimum bytes of weights for which `auto` selects a GPU: 50 million parameters in 16 bits. For a smaller
model, launching kernels takes longer than computing on a CPU."""


def reference_device(device: str, weight_bytes: int) -> str:
    """Return `cpu` or `cuda` for `reference.device`.

    Args:
        device: `auto`, `cpu` or `cuda`.
        weight_bytes: Bytes of the checkpoint's weights on disk.

    Raises:
        MissingRequirement: `device` is `cuda` and torch finds no GPU.
    """
    if device == "cpu" or (device == "auto" and weight_bytes < MIN_BYTES):
        return "cpu"
    import torch

    if torch.version.cuda is not None and torch.cuda.is_available():
        return "cuda"
    if device == "cuda":
        raise MissingRequirement(
            "reference.device=cuda: torch finds no NVIDIA GPU here; set reference.device=auto, which then uses the CPU"
        )
    return "cpu"


def gpu_identity() -> dict[str, object]:
    """Return the description of the current GPU for an evaluation's key."""
    import torch

    major, minor = torch.cuda.get_device_capability()
    return {"device": "cuda", "gpu": torch.cuda.get_device_name(), "compute_capability": f"{major}.{minor}"}


OLDEST = 8
"""Lowest major compute capability that the kernels compile for."""


def resolve_device(device: str) -> str:
    """Return `cpu` or `cuda` for `backend.device`; `auto` means cuda if torch finds a GPU.

    Raises MissingRequirement if the GPU is missing or unusable.
    """
    import torch

    available = torch.cuda.is_available()
    if device == "cpu" or (device == "auto" and not available):
        return "cpu"
    if torch.version.cuda is None:
        raise MissingRequirement(
            f"backend.device=cuda needs a CUDA build of torch, but this is {torch.__version__}: install a CUDA build "
            "from https://download.pytorch.org/whl/cu130, or set backend.device=cpu"
        )
    if not available:
        raise MissingRequirement(f"backend.device={device}: torch finds no NVIDIA GPU here; set backend.device=cpu")
    if find_spec("triton") is None:
        raise MissingRequirement(
            f"backend.device={device} needs triton, which is not installed here: pip install 'triton>=3.6,<3.8', or set "
            "backend.device=cpu"
        )
    major, minor = torch.cuda.get_device_capability()
    if major < OLDEST:
        raise MissingRequirement(
            f"backend.device={device} needs a GPU of compute capability {OLDEST}.0 or newer, {torch.cuda.get_device_name()} "
            f"has {major}.{minor}; set backend.device=cpu"
        )
    return "cuda"
