"""Helpers shared by the CPU and GPU tests of the kernel engine."""

from typing import Any

import numpy as np
import pytest
from torch import Tensor

from benchmarks import attention_reference as reference
from benchmarks import benchlib
from helpers.engines.random_llama import FP8, fmt
from plugins.kv_attention import launch
from plugins.kv_attention.layout import CacheLayout
from stages.policies.policy import KVPolicy, KVShape, LayerOverride

SHAPE = KVShape(layers=4, kv_heads=2, head_dim=64)
"""Shape of the trained tiny model's cache."""

SHORT = KVShape(2, SHAPE.kv_heads, SHAPE.head_dim)
"""Shape of the cache of its first two layers."""

GUARDED = KVPolicy(
    name="guarded",
    key=FP8,
    value=fmt("int4", "per_group", group_size=32),
    sink_tokens=3,
    recent_tokens=40,
    overrides=(LayerOverride(layers=(1,), key=fmt("int8", "per_token"), value=fmt("bf16")),),
)
"""A policy with sinks, recent tokens, and two layer formats."""

CLOSE = 3e-4
"""Allowed distance of logits, relative to their norm.

The kernels round the weights of values to float16 and sum in another order; test_kernel_attention.py holds
them to 2e-3 of an attention's norm. Also, a value on the border between two codes may get the other code in the next layer.
Measured: 2e-5 to 9e-5. Reading a format wrongly moves logits far more.
"""


def short_model() -> Any:
    """Return the trained model's first two layers. GUARDED stores the second in another format."""
    model = benchlib.load_model()
    del model.model.layers[SHORT.layers :]
    model.config.num_hidden_layers = SHORT.layers
    return model


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """Return the largest L2 distance between rows of logits, relative to the norm of the second argument's row."""
    norms = np.linalg.norm((a - b).astype(np.float64), axis=-1) / np.linalg.norm(b.astype(np.float64), axis=-1)
    return float(norms.max())


def append_by_reference(
    layout: CacheLayout, key_new: Tensor, value_new: Tensor, cache: dict[str, Tensor], page_table: Tensor, lengths: Tensor,
    **tables: Any,
) -> None:  # fmt: skip
    """Run launch.append in plain torch."""
    for layer in range(len(key_new)):
        tensors = {name: tensor[layer] for name, tensor in cache.items()}
        reference.append(layout, key_new[layer], value_new[layer], tensors, page_table=page_table, lengths=lengths, **tables)


def attend_by_reference(layout: CacheLayout, query: Tensor, *args: Any, plan: Any = None, **options: Any) -> Tensor:  # noqa: ARG001
    """Run launch.decode_attention or launch.context_attention in plain torch."""
    return reference.attend(layout, query, *args, **options).to(query.dtype)


def by_reference(patch: pytest.MonkeyPatch) -> None:
    """Store tokens and compute attention in plain torch, because the interpreter is slow."""
    patch.setattr(launch, "append", append_by_reference)
    patch.setattr(launch, "context_attention", attend_by_reference)
    patch.setattr(launch, "plan_decode", lambda *_, **__: None)
    patch.setattr(launch, "decode_attention", attend_by_reference)
