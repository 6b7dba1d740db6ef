"""What the tests of the kernel engine on a CPU and on a GPU share."""

from typing import Any

import numpy as np
import pytest
from onnx_fixtures import FP8, fmt
from torch import Tensor

from benchmarks import benchlib
from pipeline.core.kv import KVPolicy, KVShape, LayerOverride
from plugins.kv_attention import launch, reference
from plugins.kv_attention.layout import CacheLayout

SHAPE = KVShape(layers=4, kv_heads=2, head_dim=64)
"""Of the trained tiny model."""

SHORT = KVShape(2, SHAPE.kv_heads, SHAPE.head_dim)
"""Of its first two layers."""

GUARDED = KVPolicy(
    name="guarded",
    key=FP8,
    value=fmt("int4", "per_group", group_size=32),
    sink_tokens=3,
    recent_tokens=40,
    overrides=(LayerOverride(layers=(1,), key=fmt("int8", "per_token"), value=fmt("bf16")),),
)
"""Sinks, recent tokens, and layers of two formats."""

CLOSE = 3e-4
"""Of the logits' norm. The kernels round weights of values to float16 and sum in another order, and are held to 2e-3 of an
attention's norm in tests/integration/test_kernel_decode.py; and a value on a border between two codes may get the other one
in the next layer. Measured 2e-5 to 9e-5; a format that is read wrongly moves logits by far more."""


def short_model() -> Any:
    """The trained model's first two layers, of which GUARDED keeps the second in another format."""
    model = benchlib.load_model()
    del model.model.layers[SHORT.layers :]
    model.config.num_hidden_layers = SHORT.layers
    return model


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """Largest L2 distance of two rows of logits, over the norm of the second."""
    norms = np.linalg.norm((a - b).astype(np.float64), axis=-1) / np.linalg.norm(b.astype(np.float64), axis=-1)
    return float(norms.max())


def append_by_reference(
    layout: CacheLayout, key_new: Tensor, value_new: Tensor, cache: dict[str, Tensor], page_table: Tensor, lengths: Tensor,
    **tables: Any,
) -> None:  # fmt: skip
    """launch.append in plain torch."""
    for layer in range(len(key_new)):
        one = {name: tensor[layer] for name, tensor in cache.items()}
        reference.append(layout, key_new[layer], value_new[layer], one, page_table=page_table, lengths=lengths, **tables)


def attend_by_reference(layout: CacheLayout, query: Tensor, *args: Any, plan: Any = None, **options: Any) -> Tensor:  # noqa: ARG001
    """launch.decode_attention and launch.context_attention in plain torch."""
    return reference.attend(layout, query, *args, **options).to(query.dtype)


def prefill_by_reference(patch: pytest.MonkeyPatch) -> None:
    """Let prompts be stored and attended to in plain torch, which the interpreter takes much longer for."""
    patch.setattr(launch, "append", append_by_reference)
    patch.setattr(launch, "context_attention", attend_by_reference)


def decode_by_reference(patch: pytest.MonkeyPatch) -> None:
    """Let decode steps attend in plain torch, which needs no plan."""
    patch.setattr(launch, "plan_decode", lambda *_, **__: None)
    patch.setattr(launch, "decode_attention", attend_by_reference)
