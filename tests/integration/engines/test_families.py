"""Engines of every family, quantized by ModelOpt, exported and built, equal the eager model and the reference engine.

The texts are longer than every window, a prompt is prefilled in chunks, and the last tokens are decoded individually.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.checkpoints.families import MODELS, family_model
from helpers.engines.random_llama import conf_policy, forced, make_decoder
from helpers.stride import STRIDE
from transformers import PreTrainedModel

from stages.checkpoints.description import inspect_checkpoint
from stages.checkpoints.weights import check_weights
from stages.core.records import no_progress
from stages.engines.onnx.build import build_bundle
from stages.engines.onnx.config import CpuAttention
from stages.engines.onnx.engine import OnnxEngine, load_engine
from stages.engines.reference.attention import Fed
from stages.engines.reference.engine import TorchEngine
from stages.policies.policy import FP16_POLICY, KVPolicy, Window
from stages.policies.scales import SCALES_FILE, KVScales
from stages.quantize.run import measure_cache, quantize_weights, scale_cache

TINY = Path(__file__).parents[3] / "stages" / "tiny" / "checkpoint"
VOCABULARY = 1344
"""Vocabulary size of the tiny model's tokenizer, which every family borrows."""
TOKENS, FORCED = 150, 12
CHUNK = 64

MIXED = conf_policy("fp8k_int4v")
AGED = KVPolicy(
    name="aged", key=MIXED.key, value=MIXED.value.model_copy(update={"group_size": 16}),
    sink_tokens=4, recent_tokens=20, window=Window(tokens=64, key=conf_policy("int8").key, value=MIXED.key),
)  # fmt: skip
"""A policy with exact tokens and a window of finer numbers, in addition to a layer's own window.

Groups of 16 also fit heads whose size is no multiple of 64. The window's keys are int8, because float16 keys would show small
differences between the computed keys, which int8 codes hide.
"""
FEW = ("qwen2",)
"""The family of `make test`, with scaled rotations and a sliding window in some layers."""
pytestmark = pytest.mark.every


@dataclass(frozen=True)
class Served:
    """A random model of a family, and the folder of its checkpoint, exports and bundles."""

    model: PreTrainedModel
    root: Path

    def scales(self, policy: KVPolicy) -> Path:
        """Return the file of the policy's static scales, measured by ModelOpt."""
        out = self.root / f"quantized_{policy.name}"
        if not out.exists():
            out.mkdir()
            texts = ["The cache holds keys and values.", "A window slides over the latest tokens alone."]
            run: dict[str, Any] = {"calibration_texts": texts, "max_length": 32, "progress": no_progress}
            checkpoint, weights, extremes = self.root / "checkpoint", self.root / "weights", self.root / "extremes"
            if not weights.exists():
                weights.mkdir()
                extremes.mkdir()
                quantize_weights(checkpoint, weights, weights="none", seed=0, **run)
                measure_cache(checkpoint, weights, extremes, **run)
            scale_cache(checkpoint, out, policy=policy, extremes=extremes)
        return out / SCALES_FILE

    def engine(self, policy: KVPolicy, attention: CpuAttention) -> OnnxEngine:
        """Return the ONNX engine."""
        bundle = self.root / f"bundle_{policy.name}"
        if not bundle.exists():
            bundle.mkdir()
            build_bundle(self.root / "decoder", bundle, policy=policy, scales=self.scales(policy), progress=no_progress)
        engine = load_engine(bundle, threads=1, attention=attention)
        engine.prefill_chunk = CHUNK
        return engine

    def reference(self, policy: KVPolicy) -> TorchEngine:
        """Return the reference engine."""
        scales = KVScales.model_validate_json(self.scales(policy).read_bytes())
        engine = TorchEngine.from_model(self.model, policy, scales)
        engine.prefill_chunk = CHUNK
        return engine


@pytest.fixture(scope="module", params=list(MODELS) if STRIDE == 1 else FEW)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    root = tmp_path_factory.mktemp(request.param)
    model = family_model(request.param, vocab_size=VOCABULARY)
    model.save_pretrained(root / "checkpoint")
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copyfile(TINY / name, root / "checkpoint" / name)
    check_weights(inspect_checkpoint(root / "checkpoint"))
    make_decoder(root / "checkpoint", root / "decoder")
    return Served(model, root)


def text() -> list[int]:
    tokens: list[int] = np.random.default_rng(1).integers(0, VOCABULARY, TOKENS).tolist()
    return tokens


def test_fp16_equals_the_eager_model_beyond_every_window(served: Served) -> None:
    """Compare in a batch that includes a text shorter than a window."""
    config: Any = served.model.config
    assert 2 * (getattr(config, "sliding_window", None) or 0) < TOKENS - FORCED
    texts = [text(), text()[: 17 + FORCED]]
    with torch.no_grad():
        logits = [served.model(torch.tensor([ids])).logits[0, -FORCED - 1 :].numpy() for ids in texts]
    expected = np.stack(logits, axis=1)
    engine = served.engine(FP16_POLICY, "graph")
    # Past keys and values are float16 (relative error 2**-11). Gemma 3's scores come from 16 times larger products.
    np.testing.assert_allclose(forced(engine, texts, FORCED), expected, atol=1e-2 * expected.std())


def test_a_quantized_engine_equals_the_reference(served: Served) -> None:
    """Replay over the engine's own codes: a number on the border of two codes may round differently and move later logits."""
    engine, first = served.engine(AGED, "native"), TOKENS - FORCED
    if engine.shape.head_dim % 32 == 0:  # the kernel reads no 4-bit codes of other widths
        assert engine.attention == f"native in {engine.shape.layers} of {engine.shape.layers} layers"
    handles, _ = engine.prefill([text()[:first]])
    computed = np.concatenate([engine.decode(handles, [token]) for token in text()[first:]])
    fed = Fed(text(), [(first, False), (FORCED, True)])
    replay = served.reference(AGED).replay([fed], [engine.stored(handles[0])], rounding=1e-7)[0].tail(FORCED)
    np.testing.assert_allclose(computed, replay.logits, atol=1e-3 * replay.logits.std())
    assert max(float(errors.engine.max()) for layer in replay.errors for errors in layer.values()) < 1e-3


def test_replayed_rows_are_scaled_and_capped_like_the_models_logits(served: Served) -> None:
    reference, first = served.reference(FP16_POLICY), TOKENS - FORCED
    expected = reference.forced(text(), first)
    (replay,) = reference.replay([Fed(text(), [(first, False), (FORCED, True)])])
    np.testing.assert_allclose(replay.logits[1:], expected, atol=1e-5)
