"""The reference engine's vLLM formats against vLLM's own kernels: every code, scale and zero point must be equal."""

import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from helpers.policies.shipped import SHIPPED
from torch import Tensor

from stages.engines.reference.formats import quantize
from stages.policies.arithmetic_torch import unpack
from stages.policies.vllm_token_head.arithmetic_torch import encode_token_head, random_signs

SCRIPT = Path(__file__).parents[1] / "helpers" / "engines" / "vllm_kernels.py"
DIMS = (64, 96)
"""Head sizes. 96 is no power of two, so vLLM rotates blocks of 32."""
Arrays = dict[str, npt.NDArray[Any]]


def vectors(dim: int) -> Tensor:
    """Return keys and values (2, 40, 2, D): keys are exact in E4M3, values cover many cases.

    Triton's interpreter rounds to float8 differently from a GPU, so keys need no rounding. Values have many magnitudes, one
    sign, constant rows, zero rows, and ties.
    """
    rng = torch.Generator().manual_seed(dim)
    keys = torch.randint(0, 0x7F, (40, 2, dim), generator=rng).to(torch.uint8).view(torch.float8_e4m3fn).float()
    keys *= torch.where(torch.rand(keys.shape, generator=rng) < 0.5, -1.0, 1.0)
    keys[..., 0] = 448.0
    values = torch.randn(40, 2, dim, generator=rng) * torch.exp2(torch.randint(-12, 8, (40, 2, 1), generator=rng))
    values[0], values[1] = 0.0, 0.25
    values[2] += 100
    values[3] -= 3000
    values[4] = torch.randint(0, 31, (2, dim), generator=rng) * 0.5
    return torch.stack([keys, values])


@pytest.fixture(scope="module", params=DIMS)
def stored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, vllm_python: str) -> tuple[Tensor, Arrays]:
    """The vectors, and their stored form in vLLM."""
    folder = tmp_path_factory.mktemp("vllm_formats")
    x = vectors(request.param)
    np.save(folder / "vectors.npy", x.numpy())
    command = [vllm_python, str(SCRIPT), str(folder / "vectors.npy"), str(folder / "stored.npz")]
    completed = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    assert completed.returncode == 0, completed.stderr[-3000:]
    return x, dict(np.load(folder / "stored.npz"))


def nibbles(packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Unpack vLLM's codes (..., D): neighbouring channels share a byte."""
    return np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], -1)


def test_four_bit_caches_equal_vllms_bit_for_bit(stored: tuple[Tensor, Arrays]) -> None:
    """Compare codes, scales and minima of turboquant_k8v4, then codes and scales of int4_per_token_head."""
    (keys, values), theirs = stored
    slot, dim = theirs["turboquant"], keys.shape[-1]
    assert slot.shape[-1] == dim + dim // 2 + 4
    assert np.array_equal(slot[..., :dim], keys.to(torch.float8_e4m3fn).view(torch.uint8).numpy())
    ours = quantize(values, SHIPPED["vllm_k8v4"].value, None)
    assert ours.scale is not None
    assert ours.zero is not None
    assert np.array_equal(nibbles(slot[..., dim:-4]), (unpack(ours.codes, 4) + 8).numpy().astype(np.uint8))
    assert np.array_equal(slot[..., -4:-2], ours.scale.view(torch.uint8).numpy())
    assert np.array_equal(slot[..., -2:], ours.zero.view(torch.uint8).numpy())
    for states, side in ((keys, "key"), (values, "value")):
        codes, scale = encode_token_head(states)
        assert np.array_equal(nibbles(theirs[side]), codes.numpy())
        assert np.array_equal(theirs[f"{side}_scale"].view(np.int32), scale[..., 0].numpy().view(np.int32))


@pytest.mark.parametrize("kv", ["vllm_int8", "vllm_fp8"])
def test_scales_per_token_and_head_equal_vllms_bit_for_bit(stored: tuple[Tensor, Arrays], kv: str) -> None:
    """Compare all scales, and all codes but FP8 values, which Triton's interpreter rounds differently from a GPU."""
    x, theirs = stored
    name = kv.removeprefix("vllm_")
    for states, side in zip(x, ("key", "value"), strict=True):
        ours = quantize(states, SHIPPED[kv].key, None)
        assert ours.scale is not None
        assert np.array_equal(theirs[f"{name}_{side}_scale"], ours.scale[..., 0].numpy())
        if kv == "vllm_int8" or side == "key":
            assert np.array_equal(theirs[f"{name}_{side}"], ours.codes.view(torch.uint8).numpy())


def test_the_rotation_has_vllms_signs_and_is_inverted(stored: tuple[Tensor, Arrays]) -> None:
    x, theirs = stored
    size = x.shape[-1]
    assert np.array_equal(np.tile(theirs["signs"], size // len(theirs["signs"])), random_signs(size).numpy())
    np.testing.assert_allclose(theirs["rotated_back"], x.numpy(), rtol=0, atol=1e-5 * float(x.abs().max()))
