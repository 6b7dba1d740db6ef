"""Engines of the tiny model beside their twins, and faults as real caches have them, in what an engine stores or reads."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnx_fixtures import make_bundle, static_scales, tiny_decoder
from shipped import SHIPPED, conf

from pipeline.core.engine import Engine
from pipeline.core.kv import Eviction, KVPolicy
from pipeline.core.workloads import WorkloadsConfig
from pipeline.verdict.conformance import EngineConformance
from stages.checkpoints import load_causal_lm
from stages.engines.onnx.engine import OnnxEngine, load_engine
from stages.engines.oracle.engine import OracleEngine
from stages.evaluate.inputs.samples import load_samples
from stages.evaluate.inputs.tokens import BundleTokenizer, EncodedSample, encode
from stages.evaluate.twins.conformance import Comparison
from stages.evaluate.twins.twin import Twin

POLICIES = {
    policy.name: policy
    for policy in SHIPPED.values()  # but for groups of 128 channels in heads of 64, and what ONNX's operators do not compute
    if policy.name != "int4_g128" and not any(form.code.oracle_only for _, form in policy.formats)
}
POLICIES |= {
    f"{name}_evicting": POLICIES[name].model_copy(update={"name": f"{name}_evicting", "eviction": eviction})
    for name, eviction in (
        ("int8", Eviction(window_tokens=64)),
        ("int4_sinks", Eviction(window_tokens=128, sink_tokens=64)),
    )
}
"""Every shipped policy that heads of 64 channels and ONNX's operators allow, and evictions shorter than the samples."""
BATCH = 3


def conformance_config(**changes: Any) -> WorkloadsConfig:
    base = conf("workloads", "base")
    load = {**base["load"], "batch": 2, "context_tokens": 70, "new_tokens": 4}
    values = {"seed": 0, "samples": {"prose": 1, "retrieval": 2}, "jsonl": None, "batch_size": BATCH, "max_scored_tokens": 72}
    return WorkloadsConfig.model_validate({**base, "rounds": [1.0], "load": load, **values, **changes})


def compare(engine: Engine, twin: Twin, encoded: Sequence[EncodedSample], batch_size: int) -> EngineConformance:
    """Decode samples on an engine, forced, and compare every one of them with the twin."""
    comparison = Comparison(engine, twin, encoded, range(len(encoded)), batch_size=batch_size)
    comparison.decode_missing()
    return comparison.result()


class Conformity:
    """The tiny model: its samples in tokens, and engines and twins by policy."""

    def __init__(self, checkpoint: Path, factory: pytest.TempPathFactory) -> None:
        self.checkpoint, self.factory, self.work = checkpoint, factory, factory.mktemp("conformity")
        self.model = load_causal_lm(checkpoint, dtype=torch.float32)
        config = conformance_config()
        self.encoded: list[EncodedSample] = encode(load_samples(config), BundleTokenizer(checkpoint), config.max_scored_tokens)

    def engine(self, policy: KVPolicy, attention: Any = "native") -> OnnxEngine:
        bundle = self.work / policy.name
        if not bundle.exists():
            make_bundle(tiny_decoder(self.factory, self.checkpoint), bundle, policy)
        return load_engine(bundle, threads=1, attention=attention)

    def twin(self, policy: KVPolicy, engine: OnnxEngine) -> Twin:
        oracle = OracleEngine.from_model(self.model, policy, static_scales(policy, engine.shape))
        return Twin(oracle, "float32")

    def compared(self, policy: KVPolicy, engine: OnnxEngine) -> EngineConformance:
        return compare(engine, self.twin(policy, engine), self.encoded, BATCH)


def stores(engine: OnnxEngine, alter: Callable[[dict[str, Any]], None]) -> OnnxEngine:
    """Alter what every step stores: `alter` gets the new tokens (B, H, S, W) by array."""
    append = engine.pool.append

    def altered(handles: Any, new: Any) -> None:
        copies = {name: np.array(values) for name, values in new.items()}
        alter(copies)
        append(handles, copies)

    engine.pool.append = altered  # type: ignore[method-assign]
    return engine


def key_scale_twice(new: dict[str, Any]) -> None:
    new["key_scale_pool.2"][:, 1] *= 2


def values_a_tenth_larger(new: dict[str, Any]) -> None:
    for name, array in list(new.items()):
        if name.startswith("value_scale_pool"):
            new[name] = (array * 1.1).astype(array.dtype)


def codes_towards_zero(new: dict[str, Any]) -> None:
    """Every other code of int8 is one step nearer to zero, as half of all are that are rounded towards it."""
    for name, array in new.items():
        if name.startswith(("key_pool", "value_pool")):
            array[..., ::2] -= np.sign(array[..., ::2])


def groups_swapped(new: dict[str, Any]) -> None:
    new["value_scale_pool.1"][:, 1] = new["value_scale_pool.1"][:, 1][..., ::-1].copy()


def second_page_negated(new: dict[str, Any]) -> None:
    """The values of the second page of a prompt are stored with the wrong sign in one layer."""
    new["value_pool.1"][:, :, 64:128] *= -1


def sinks_zeroed(engine: OnnxEngine) -> OnnxEngine:
    append, sinks = engine.pool.append, engine.policy.sink_tokens

    def forgetful(handles: Any, new: Any) -> None:
        append(handles, new)
        for name, array in engine.pool.arrays.items():
            if name.startswith("key_exact"):
                array[:, :, :sinks] = 0

    engine.pool.append = forgetful  # type: ignore[method-assign]
    return engine


def last_of_a_page_unwritten(engine: OnnxEngine) -> OnnxEngine:
    append = engine.pool.append

    def forgetful(handles: Any, new: Any) -> None:
        append(handles, new)
        for name, array in engine.pool.arrays.items():
            if "_pool" in name:
                array[:, :, 63] = 0

    engine.pool.append = forgetful  # type: ignore[method-assign]
    return engine


def stale_page_now_and_then(engine: OnnxEngine) -> OnnxEngine:
    """In one step of ten the second page of every sequence is read from where its first one lies."""
    tables, steps = engine.pool.tables, [0]

    def stale(handles: Any) -> Any:
        found = tables(handles)
        steps[0] += 1
        if steps[0] % 10 == 0 and found["page_table"].shape[1] > 1:
            found["page_table"][:, 1] = found["page_table"][:, 0]
        return found

    engine.pool.tables = stale  # type: ignore[method-assign]
    return engine
