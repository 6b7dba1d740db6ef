"""Script for vLLM's interpreter: runs vLLM's 4-bit and 8-bit cache kernels in Triton's interpreter on a file's vectors.

    python vllm_kernels.py VECTORS.npy STORED.npz

VECTORS.npy holds keys and values (2, T, H, D) float32. STORED.npz gets the bytes that vLLM stores:
- turboquant_k8v4: `turboquant` (T, H, slot).
- int4_per_token_head: `key`, `value` (T, H, D / 2), float32 `key_scale`, `value_scale` (T, H), the rotation's `signs`, and
  `rotated_back` (2, T, H, D), the vectors after rotation and its inverse.
- int8_per_token_head and fp8_per_token_head: codes `int8_key` and `fp8_key` (T, H, D) and scales `int8_key_scale` and
  `fp8_key_scale` (T, H), and the same names with `value`.
"""

import os
import sys
from types import SimpleNamespace

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton.backends

# vLLM's CPU build disables Triton unless Triton has a CPU backend. The interpreter needs no backend.
triton.backends.backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))

from vllm.v1.attention.ops import int4_per_token_head as token_head  # noqa: E402
from vllm.v1.attention.ops import triton_reshape_and_cache_flash as absmax  # noqa: E402
from vllm.v1.attention.ops import triton_turboquant_store as turboquant  # noqa: E402
from vllm.v1.kv_cache_interface import KVQuantMode  # noqa: E402

BLOCK = 16
"""Tokens per block of vLLM's cache."""


def block_of(dim: int) -> int:
    """Return the channels that are rotated together: the largest power of two that divides `dim`."""
    return dim & -dim


def main(source: str, target: str) -> None:
    vectors = torch.from_numpy(np.load(source))
    key, value = vectors
    tokens, heads, dim = key.shape
    blocks = -(-tokens // BLOCK)
    slots = torch.arange(tokens, dtype=torch.int64)

    cache = torch.zeros(blocks, BLOCK, heads, dim + dim // 2 + 4, dtype=torch.uint8)
    turboquant.triton_turboquant_store(
        key, value, cache, slots.int(), None, None, mse_bits=4, key_packed_size=dim, value_quant_bits=4, key_fp8=True
    )
    arrays: dict[str, np.ndarray] = {}
    packed = [torch.zeros(blocks, BLOCK, heads, dim // 2, dtype=torch.uint8) for _ in range(2)]
    scales = [torch.zeros(blocks, BLOCK, heads) for _ in range(2)]
    token_head.reshape_and_cache_int4(key, value, *packed, slots, k_scale_cache=scales[0], v_scale_cache=scales[1])
    block = block_of(dim)
    rotated_back = token_head.single_rht(token_head.single_rht(vectors), inverse=True) / block

    def stored(tensor: torch.Tensor) -> np.ndarray:
        rows: np.ndarray = tensor.flatten(0, 1)[:tokens].numpy()
        return rows

    for name, dtype in (("int8", torch.int8), ("fp8", torch.float8_e4m3fn)):
        codes = [torch.zeros(blocks, BLOCK, heads, dim, dtype=dtype) for _ in range(2)]
        units = [torch.zeros(blocks, BLOCK, heads) for _ in range(2)]
        mode = KVQuantMode[f"{name}_per_token_head".upper()]
        absmax.triton_reshape_and_cache_flash_per_token_head_quant(key, value, *codes, *units, slots, mode)
        for side, code, unit in zip(("key", "value"), codes, units, strict=True):
            arrays |= {f"{name}_{side}": stored(code.view(torch.uint8)), f"{name}_{side}_scale": stored(unit)}

    arrays |= {
        "turboquant": stored(cache),
        "key": stored(packed[0]),
        "value": stored(packed[1]),
        "key_scale": stored(scales[0]),
        "value_scale": stored(scales[1]),
        "signs": token_head._get_rht_signs(block, 0, torch.device("cpu")).numpy(),
        "rotated_back": rotated_back.numpy(),
    }
    np.savez(target, allow_pickle=False, **arrays)


main(*sys.argv[1:])
