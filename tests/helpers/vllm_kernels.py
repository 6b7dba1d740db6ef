"""Runs vLLM's own kernels that store 4-bit caches, in its interpreter and in Triton's interpreter, on the vectors of a file.

    python vllm_kernels.py VECTORS.npy STORED.npz

VECTORS.npy holds keys and values (2, T, H, D) float32. STORED.npz gets the bytes that vLLM stores of them: `turboquant`
(T, H, slot), `key`, `value` (T, H, D / 2) and the float32 `key_scale`, `value_scale` (T, H) of int4_per_token_head, and its
`rotated_back` (2, T, H, D) of the vectors.
"""

import os
import sys
from types import SimpleNamespace

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton.backends

# vLLM's CPU build turns Triton off unless it has a backend for CPUs; the interpreter needs none.
triton.backends.backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))

from vllm.v1.attention.ops import int4_per_token_head as token_head  # noqa: E402
from vllm.v1.attention.ops import triton_turboquant_store as turboquant  # noqa: E402

BLOCK = 16
"""Tokens of a block of vLLM's cache."""


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
    packed = [torch.zeros(blocks, BLOCK, heads, dim // 2, dtype=torch.uint8) for _ in range(2)]
    scales = [torch.zeros(blocks, BLOCK, heads) for _ in range(2)]
    token_head.reshape_and_cache_int4(key, value, *packed, slots, k_scale_cache=scales[0], v_scale_cache=scales[1])
    block = dim & -dim
    rotated_back = token_head.single_rht(token_head.single_rht(vectors), inverse=True) / block

    def stored(tensor: torch.Tensor) -> np.ndarray:
        rows: np.ndarray = tensor.flatten(0, 1)[:tokens].numpy()
        return rows

    np.savez(
        target,
        turboquant=stored(cache),
        key=stored(packed[0]),
        value=stored(packed[1]),
        key_scale=stored(scales[0]),
        value_scale=stored(scales[1]),
        signs=token_head._get_rht_signs(block, 0, torch.device("cpu")).numpy(),
        rotated_back=rotated_back.numpy(),
    )


main(*sys.argv[1:])
