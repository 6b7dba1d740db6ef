"""What `reference.device` means on this machine. Importing the module is cheap."""

from pipeline.core.errors import MissingRequirement

LEAST_BYTES = 100_000_000
"""Size of a checkpoint's weights from which on `auto` is a GPU: 50 million parameters in 16 bits. Launching kernels takes a
smaller model longer than computing on a CPU."""


def reference_device(asked: str, weight_bytes: int) -> str:
    """Return `cpu` or `cuda` for `reference.device`.

    Args:
        asked: `auto`, `cpu` or `cuda`.
        weight_bytes: Bytes of the checkpoint's weights on the disk.

    Raises:
        MissingRequirement: `cuda` is asked for and torch finds no GPU.
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
    """Return the current GPU, as a part of an evaluation's key."""
    import torch

    major, minor = torch.cuda.get_device_capability()
    return {"device": "cuda", "gpu": torch.cuda.get_device_name(), "compute_capability": f"{major}.{minor}"}
