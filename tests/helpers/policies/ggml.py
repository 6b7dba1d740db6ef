"""llama.cpp's cache types, tensors to store, and the stored bytes in ggml's layout."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stages.policies.arithmetic_torch import Stored
from stages.policies.formats import Format
from stages.policies.table import GGML_BLOCK, GGML_TYPES

NAMES = [spec.name for spec in GGML_TYPES]


def form_of(name: str, rotation: str = "none") -> Format:
    fields = {"dtype": name, "granularity": "per_group", "group_size": GGML_BLOCK, "scale": "dynamic", "rotation": rotation}
    return Format.model_validate(fields)


def vectors() -> Tensor:
    """Return vectors (2, 12, 64): random at many magnitudes, of one sign, constant, and zero."""
    x = torch.randn(2, 12, 64, generator=torch.Generator().manual_seed(0)) * torch.exp2(torch.arange(12.0) - 6)[:, None]
    x[:, 0], x[:, 1] = 0.0, 0.25
    x[:, 2] += 100
    x[:, 3] -= 300
    return x


def raw(stored: Stored) -> npt.NDArray[np.uint8]:
    """Return the bytes in ggml's layout: for each block, its scale, then its codes."""
    assert stored.scale is not None
    blocks = stored.scale.shape[-1]
    scales = stored.scale.unsqueeze(-1).contiguous().view(torch.uint8)
    codes = stored.codes.contiguous().view(torch.uint8)
    joined = torch.cat([scales, codes.reshape(*codes.shape[:-1], blocks, -1)], dim=-1)
    bytes_: npt.NDArray[np.uint8] = joined.flatten(-2).numpy()
    return bytes_
