"""Engines of the tiny model and their reference engines."""

from pathlib import Path
from typing import Any

import pytest
import torch
from faults.hooks import Plant, sound

from helpers.engines.random_llama import SHIPPED as SERVED
from helpers.engines.random_llama import make_bundle, static_scales, tiny_decoder
from helpers.policies.shipped import SHIPPED, conf
from stages.checkpoints.loading import load_causal_lm
from stages.engines.onnx.engine import OnnxEngine, load_engine
from stages.engines.reference.engine import TorchEngine
from stages.evaluate.conformance.comparer import ReferenceEngine, SequenceComparer
from stages.evaluate.conformance.comparison import ForcedDecodeComparison
from stages.evaluate.inputs.samples import load_samples
from stages.evaluate.inputs.tokens import BundleTokenizer, EncodedSample, encode
from stages.policies.policy import Eviction, KVPolicy
from stages.verdict.conformance import EngineConformance
from stages.workloads.config import WorkloadsConfig

POLICIES = {policy.name: SHIPPED[policy.name] for policy in SERVED}
POLICIES |= {
    f"{name}_evicting": POLICIES[name].model_copy(update={"name": f"{name}_evicting", "eviction": eviction})
    for name, eviction in (("int8", Eviction(window_tokens=64)), ("int4_sinks", Eviction(window_tokens=128, sink_tokens=64)))
}
"""The shipped policies that fit heads of 64 channels and ONNX's operators, and two policies that evict within a sample."""
BATCH = 3


def conformance_config(**changes: Any) -> WorkloadsConfig:
    base = conf("", "workloads_base")
    load = {**base["load"], "batch": 2, "context_tokens": 70, "new_tokens": 4}
    values = {"seed": 0, "samples": {"prose": 1, "retrieval": 2}, "jsonl": None, "batch_size": BATCH, "max_scored_tokens": 72}
    return WorkloadsConfig.model_validate({**base, "rounds": [1.0], "load": load, **values, **changes})


class Conformity:
    """The tiny model's encoded samples, and its engines and reference engines by policy."""

    def __init__(self, checkpoint: Path, factory: pytest.TempPathFactory) -> None:
        self.checkpoint, self.factory, self.work = checkpoint, factory, factory.mktemp("conformity")
        self.model = load_causal_lm(checkpoint, dtype=torch.float32)
        config = conformance_config()
        self.encoded: list[EncodedSample] = encode(load_samples(config), BundleTokenizer(checkpoint), config.max_scored_tokens)

    def engine(self, policy: KVPolicy, attention: Any = "native", fault: Plant = sound) -> OnnxEngine:
        bundle = self.work / policy.name
        if not bundle.exists():
            make_bundle(tiny_decoder(self.factory, self.checkpoint), bundle, policy)
        engine = load_engine(bundle, threads=1, attention=attention)
        fault(engine)
        return engine

    def reference(self, policy: KVPolicy, engine: OnnxEngine | TorchEngine) -> ReferenceEngine:
        torch_engine = TorchEngine.from_model(self.model, policy, static_scales(policy, engine.shape))
        return ReferenceEngine(torch_engine)

    def compared(self, policy: KVPolicy, engine: OnnxEngine | TorchEngine) -> EngineConformance:
        """Force-decode the samples on an engine and compare every sample with the reference."""
        comparer = SequenceComparer(engine, self.reference(policy, engine))
        comparison = ForcedDecodeComparison(comparer, self.encoded, set(range(len(self.encoded))), BATCH)
        comparison.decode_missing()
        return comparison.result()
