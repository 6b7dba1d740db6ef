"""Access to vLLM's KV cache in memory: supported types, scales of the loaded layers, and the codes of a request.

Codes can be read only in the layout of the CPU's `vec` kernels (vllm/v1/attention/backends/cpu_attn.py,
csrc/cpu/cpu_attn_vec.hpp): a block of a head stores its keys channel by channel, then its values token by token.
"""

from pathlib import Path
from typing import Any

SCALED, UNSCALED = ("fp8", "nvfp4"), ("e5m2", "per_token_head")
"""A cache type reads the layer's scale if its name starts with a prefix in SCALED and has no suffix in UNSCALED."""


def refusal(platform: str, dtype: str) -> str:
    """Return why this machine does not support a cache type; empty if it does, or if only loading can tell."""
    if platform != "cpu":
        return ""
    import torch
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    supported = CPUAttentionBackend.supported_kv_cache_dtypes
    if dtype not in supported:
        return f"vLLM's attention on a CPU supports {', '.join(supported)}"
    fast = torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()
    return "" if fast or not dtype.startswith("fp8") else "FP8 on a CPU needs AVX-512 or AMX, which this CPU lacks"


class Cache:
    """The cache of an engine whose scheduler runs in this process. Each worker stores an equal share of the KV heads."""

    def __init__(self, core: Any) -> None:
        self.core, self.heads = core, int(core.vllm_config.model_config.get_total_num_kv_heads())
        self.copies = max(1, core.vllm_config.parallel_config.tensor_parallel_size // self.heads)
        """Number of workers that store the same KV head."""
        self.freed: dict[str, tuple[list[int], int]] = {}
        """Request name -> its blocks when they were freed, and the number of its preemptions. The blocks of a finished
        request keep their content until the next step."""
        manager = core.scheduler.kv_cache_manager
        free = manager.free

        def record_and_free(request: Any) -> None:
            # vLLM appends a random suffix to the request's name.
            blocks = list(manager.get_block_ids(request.request_id)[0])
            self.freed[request.request_id.rpartition("-")[0]] = blocks, int(request.num_preemptions)
            free(request)

        manager.free = record_and_free

    def _call_workers(self, function: Any, *args: Any) -> list[Any]:
        """Call a function of this module in every worker; return one result per share of the KV heads, in order."""
        return list(self.core.model_executor.collective_rpc(function, args=args)[:: self.copies])

    def facts(self) -> dict[str, Any]:
        """Return the scales of the attention layers in order, and the tokens and bytes of a cache block."""
        parts = self._call_workers(_facts)
        layers = zip(*(part["scales"] for part in parts), strict=True)
        return {
            "scales": [{side: self._join([part[side] for part in ranks]) for side in ("key", "value")} for ranks in layers],
            "block_tokens": int(self.core.vllm_config.cache_config.block_size),
            "block_bytes": self.copies * sum(part["block_bytes"] for part in parts),
        }

    def _join(self, parts: list[list[float]]) -> list[float]:
        """Join the scales of several workers to one number per KV head. A single worker's scales are returned unchanged."""
        if len(parts) == 1:
            return parts[0]
        return [number for part in parts for number in part * (self.heads // len(parts) // len(part))]

    def corrupt_keys(self, factor: float) -> None:
        """Make attention read keys that are `factor` times the correct keys.

        A layer with a scale was loaded with `factor` times its scale; its codes are written with the correct scale. A layer
        without a scale stores `factor` times each key.
        """
        self._call_workers(_corrupt_keys, factor)

    def write(self, blocks: list[int], length: int, path: Path) -> bool:
        """Write the stored keys and then values of every layer, (H, length, D) each. Return False if the layout is unknown."""
        import numpy as np

        parts = self._call_workers(_read_stored, blocks, length)
        if any(part is None for part in parts):
            return False
        np.concatenate([part for side in zip(*parts, strict=True) for part in side]).tofile(path)
        return True


def _layers(worker: Any) -> list[Any]:
    context = getattr(worker, "worker", worker).model_runner.vllm_config.compilation_config.static_forward_context
    return [layer for layer in context.values() if hasattr(layer, "_k_scale")]


def _facts(worker: Any) -> dict[str, Any]:
    layers = _layers(worker)
    return {
        "scales": [{"key": _numbers(layer, "k"), "value": _numbers(layer, "v")} for layer in layers],
        "block_bytes": sum(layer.kv_cache[0].numel() * layer.kv_cache.element_size() for layer in layers),
    }


def _corrupt_keys(worker: Any, factor: float) -> None:
    for layer in _layers(worker):
        scaled = layer.kv_cache_dtype.startswith(SCALED) and not layer.kv_cache_dtype.endswith(UNSCALED)
        write = layer.impl.do_kv_cache_update
        layer.impl.do_kv_cache_update = _with_faulted_scale(write, factor) if scaled else _with_faulted_keys(write, factor)


def _read_stored(worker: Any, blocks: list[int], length: int) -> Any:
    """Return the bytes of keys and then values of every layer, (H, length, D) each; None if the layout is unknown."""
    import torch

    layers = _layers(worker)
    if any(getattr(layer, "isa", None) != "vec" for layer in layers):
        return None
    chosen, rows = torch.tensor(blocks), []
    for layer in layers:
        cache = layer.kv_cache[chosen]
        count, heads, tokens, width = cache.shape
        channels = width // 2
        keys, values = cache.reshape(count, heads, 2 * tokens, channels).chunk(2, dim=2)
        keys = keys.reshape(count, heads, channels, tokens).transpose(2, 3)
        for side in (keys, values):
            part = side.transpose(0, 1).reshape(heads, count * tokens, channels)[:, :length].contiguous()
            part = part.half() if part.dtype in (torch.bfloat16, torch.float32) else part
            rows.append(part.view(torch.uint8).flatten().numpy())
    return rows


def _numbers(layer: Any, side: str) -> list[float]:
    """Return the scales that a layer's kernel reads: one number on a CPU, otherwise the scale tensor."""
    scale = getattr(layer, f"_{side}_scale")
    if scale.device.type == "cpu":
        return [float(getattr(layer, f"_{side}_scale_float"))]
    return [float(x) for x in scale.flatten().tolist()]


def _with_faulted_scale(write: Any, factor: float) -> Any:
    """Return a cache update that writes codes with the correct scale, although the layer has `factor` times that scale."""

    def update(layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> Any:
        # Change the tensor in place: it is a parameter of the layer in some releases and a buffer in others.
        exact, number = layer._k_scale.detach().clone(), layer._k_scale_float
        layer._k_scale.data.copy_(exact / factor)
        layer._k_scale_float = number / factor
        try:
            return write(layer, key, value, kv_cache, slot_mapping)
        finally:
            layer._k_scale.data.copy_(exact)
            layer._k_scale_float = number

    return update


def _with_faulted_keys(write: Any, factor: float) -> Any:
    def update(layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> Any:
        return write(layer, key * factor, value, kv_cache, slot_mapping)

    return update
