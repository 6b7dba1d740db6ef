"""Runs in vLLM's interpreter: writes keys and values with vLLM's own operator, and compares its codes with torch's rounding.

Prints one JSON object. Needs vLLM's CPU build and nothing of kvgate.
"""

import json
import sys
from typing import Any

BLOCK, HEADS, DIM = 64, 2, 64
TYPES = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}


def counts(dtype: str, cache: str, scale: float) -> dict[str, Any]:
    """Return how many codes are those of rounding to nearest (ties to even), and how many those of rounding towards zero."""
    import torch
    import vllm  # noqa: F401  (registers the operators)
    from vllm import _custom_ops as ops

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, BLOCK, HEADS, DIM, generator=generator) * 3.0
    key, value = x.to(getattr(torch, dtype))
    stored = torch.zeros(1, HEADS, 2 * BLOCK, DIM, dtype=torch.uint8)
    key_cache, value_cache = stored.chunk(2, dim=2)
    slots = torch.arange(BLOCK)
    ops.cpu_attn_reshape_and_cache(key, value, key_cache, value_cache, slots, "vec", scale, scale, cache)
    # A block of a head holds its keys channel by channel, its values token by token.
    keys = key_cache[0].reshape(HEADS, DIM, BLOCK).permute(2, 0, 1)
    values = value_cache[0].permute(1, 0, 2)
    found: dict[str, Any] = {"activations": dtype, "cache": cache, "scale": scale}
    for name, codes, source in (("keys", keys, key), ("values", values, value)):
        kind = getattr(torch, TYPES[cache])
        steps = source.float() / scale
        nearest = steps.clamp(-torch.finfo(kind).max, torch.finfo(kind).max).to(kind)
        larger = nearest.float().abs() > steps.abs()
        truncated = nearest.view(torch.uint8) - larger.to(torch.uint8)  # the code below it in magnitude
        found[name] = {
            "codes": codes.numel(),
            "nearest": int((codes == nearest.view(torch.uint8)).sum()),
            "towards_zero": int((codes == truncated).sum()),
        }
    return found


if __name__ == "__main__":
    import vllm

    cases = [
        (activations, cache, scale)
        for cache, scales in (("fp8_e4m3", (1.0, 0.0375)), ("fp8_e5m2", (1.0,)))
        for activations in ("float32", "bfloat16")
        for scale in scales
    ]
    results = [counts(*case) for case in cases]
    sys.stdout.write("\n" + json.dumps({"release": vllm.__version__, "cases": results}) + "\n")
