"""Resolves `reference.device` on this machine. Importing the module is cheap."""

from stages.core.errors import MissingRequirement

LEAST_BYTES = 100_000_000
"""Minimum bytes of a checkpoint's weights for which `auto` selects a GPU: 50 million parameters in 16 bits. For a smaller
model, launching kernels takes longer than computing on a CPU."""


def reference_device(asked: str, weight_bytes: int) -> str:
    """Return `cpu` or `cuda` for `reference.device`.

    Args:
        asked: `auto`, `cpu` or `cuda`.
        weight_bytes: Bytes of the checkpoint's weights on disk.

    Raises:
        MissingRequirement: `asked` is `cuda` and torch finds no GPU.
    """
    if asked == "cpu" or (asked == "auto" and weight_bytes < LEAST_BYTES):
        return "cpu"
    import torch

    if torch.version.cuda is not None and torch.cuda.is_available():
        return "cuda"
    if asked == "cuda":
        raise MissingRequirement(
            "reference.device=cuda: torch finds no NVIDIA GPU here; set reference.device=auto, which is a CPU without one"
        )
    return "cpu"


def gpu_identity() -> dict[str, object]:
    """Return the description of the current GPU for an evaluation's key."""
    import torch

    major, minor = torch.cuda.get_device_capability()
    return {"device": "cuda", "gpu": torch.cuda.get_device_name(), "compute_capability": f"{major}.{minor}"}
