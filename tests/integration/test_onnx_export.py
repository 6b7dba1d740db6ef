"""Every supported model family exports and equals transformers."""

import gc
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from amount import STRIDE
from checkpoints import save_checkpoint
from onnx_fixtures import (
    FP8,
    INT4,
    fmt,
    load_model,
    make_bundle,
    make_decoder,
    make_engine,
    make_oracle,
    nothing,
    save_model,
    shared_checkpoint,
    shared_decoder,
)
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from pipeline.core.errors import UserError
from pipeline.core.kv import FP16_POLICY, KVPolicy, LayerOverride, Window
from stages.engines.onnx import weights
from stages.engines.onnx.engine import OnnxEngine, load_engine
from stages.engines.onnx.export import export_decoder

SIZE = {
    "vocab_size": 64, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.1, "max_position_embeddings": 128,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
FAMILIES = {
    "llama_llama3_rope_tied": LlamaConfig(**SIZE, head_dim=32, rope_scaling=LLAMA3, tie_word_embeddings=True),
    "mistral_linear_rope": MistralConfig(
        **SIZE, head_dim=16, sliding_window=None, rope_scaling={"rope_type": "linear", "factor": 2.0}
    ),
    "qwen2_biases_yarn_rope": Qwen2Config(**SIZE, rope_scaling=YARN),
    "qwen3_norms_untied": Qwen3Config(**SIZE, head_dim=32, tie_word_embeddings=False),
}
INT4_ASYM, INT8_CHANNEL = fmt("int4", "per_token", symmetric=False), fmt("int8", "per_channel", symmetric=False)
QUANTIZED = {
    "fp8k_int4v_token": KVPolicy(name="fp8k_int4v_token", key=FP8, value=INT4),
    "ages": KVPolicy(name="ages", key=INT8_CHANNEL, value=INT4_ASYM, sink_tokens=4, recent_tokens=9,
                     window=Window(tokens=64, value=FP8)),
    "overridden": KVPolicy(name="overridden", key=INT4_ASYM, value=INT4,
                           overrides=(LayerOverride(layers=(1,), key=fmt("fp8_e5m2", "per_head")),)),
}  # fmt: skip
torch.set_num_threads(1)


def randomise_vectors(path: Path) -> None:
    """Biases and norms start as zeros and ones, which would hide that they were lost."""
    model = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    save_checkpoint(model, path)


# In `make test` Llama and Qwen3: test_sliding_layers.py exports Mistral and Qwen2.
@pytest.fixture(scope="module", params=list(FAMILIES)[:: 1 if STRIDE == 1 else 3])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A random checkpoint of the family and its skeleton."""
    root = tmp_path_factory.mktemp(request.param)
    checkpoint = save_model(FAMILIES[request.param], root / "checkpoint")
    randomise_vectors(checkpoint)
    return checkpoint, make_decoder(checkpoint, root / "decoder")


def run(engine: OnnxEngine, texts: list[list[int]]) -> np.ndarray:
    """Logits (4, B, V): of the prefill of all but the last three tokens, then of these."""
    handles, logits = engine.prefill([text[:-3] for text in texts])
    return np.array([logits, *(engine.decode(handles, [text[i] for text in texts]) for i in (-3, -2, -1))])


def texts() -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, 64, length).tolist() for length in (5, 64, 70, 131)]


@pytest.mark.every
def test_family_exports_and_equals_transformers(family: tuple[Path, Path], tmp_path: Path) -> None:
    checkpoint, decoder = family
    skeleton = onnx.load(decoder / "decoder.onnx", load_external_data=False).graph.node
    assert [node.op_type for node in skeleton if node.domain == "kv"] == ["Attention"] * 2
    model = load_model(checkpoint)
    steps = run(make_engine(decoder, tmp_path / "bundle", FP16_POLICY), texts())
    for row, text in enumerate(texts()):
        with torch.no_grad():
            expected = model(torch.tensor([text])).logits[0, -4:].numpy()
        scale = expected.std()
        np.testing.assert_allclose(steps[0, row], expected[0], atol=1e-4 * scale)
        # Past keys and values are float16 (relative 2**-11).
        np.testing.assert_allclose(steps[1:, row], expected[1:], atol=5e-3 * scale)


@pytest.mark.every
@pytest.mark.parametrize("name", ["fp8k_int4v_token", "ages", "overridden"])
def test_family_equals_the_oracle_over_a_quantized_cache(name: str, family: tuple[Path, Path], tmp_path: Path) -> None:
    """Within 1 % of the logits' standard deviation for values on the border between two codes, measured 0.4 %."""
    checkpoint, decoder = family
    policy = QUANTIZED[name]
    engine = make_engine(decoder, tmp_path / "bundle", policy)
    oracle = make_oracle(load_model(checkpoint), policy, engine.shape)
    steps = run(engine, texts())
    expected = np.stack([oracle.forced(text, len(text) - 3) for text in texts()], axis=1)
    difference = np.abs(steps[1:] - expected).max(-1) / expected.std()
    assert difference.max() < 1e-2
    assert np.median(difference) < 2e-4


@pytest.mark.usefixtures("family")
def test_no_weight_stays_in_memory_after_an_export() -> None:
    gc.collect()
    tensors = [found for found in gc.get_objects() if type(found) in (torch.Tensor, torch.nn.Parameter)]
    assert [found.shape for found in tensors if sorted(found.shape) == [48, 64]] == []


def test_a_checkpoint_that_the_graph_cannot_express_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0}
    checkpoint = save_model(LlamaConfig(**SIZE, head_dim=16, rope_scaling=rope), tmp_path / "checkpoint")
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match="rope_type=dynamic is not supported"):
        export_decoder(checkpoint, tmp_path / "out", compute_dtype="float32", progress=nothing)
    assert not any((tmp_path / "out").iterdir())


@pytest.mark.every
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16][::STRIDE], ids=str)
def test_weights_of_16_bits_stay_so_on_disk_and_no_logit_changes(
    dtype: torch.dtype, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow = make_bundle(shared_decoder(tmp_path_factory, "float32", dtype), tmp_path / "narrow_bundle", FP16_POLICY)
    checkpoint = shared_checkpoint(tmp_path_factory, dtype)
    assert (narrow / "weights.bin").read_bytes() == (checkpoint / "model.safetensors").read_bytes()
    monkeypatch.setattr(weights, "SIXTEEN_BITS", ())
    wide = make_bundle(make_decoder(checkpoint, tmp_path / "wide"), tmp_path / "wide_bundle", FP16_POLICY)
    stored, before = ((bundle / "weights.bin").stat().st_size for bundle in (narrow, wide))
    assert stored < 0.6 * before
    texts = [[5, 6, 7, 8, 9], list(range(70))]
    logits, expected = (run(load_engine(bundle, threads=1), texts) for bundle in (narrow, wide))
    assert np.array_equal(logits, expected)
