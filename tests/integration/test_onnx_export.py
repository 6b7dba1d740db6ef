"""Every supported model family exports and equals transformers."""

import inspect
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx_fixtures import make_engine, nothing, save_model
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from pipeline.checkpoint import DEFAULTS
from pipeline.errors import UserError
from pipeline.kv import FP16_POLICY
from stages.onnx.export import export_decoder

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
torch.set_num_threads(1)


def randomise_vectors(path: Path) -> None:
    """Biases and norms start as zeros and ones, which would hide that they were lost."""
    model = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(path)


@pytest.mark.parametrize("family", FAMILIES)
def test_family_exports_and_equals_transformers(family: str, tmp_path: Path) -> None:
    checkpoint = save_model(FAMILIES[family], tmp_path / "checkpoint")
    randomise_vectors(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    (tmp_path / "decoder").mkdir()
    export_decoder(checkpoint, tmp_path / "decoder", compute_dtype="float32", progress=nothing)
    skeleton = onnx.load(tmp_path / "decoder" / "decoder.onnx", load_external_data=False).graph.node
    assert [node.op_type for node in skeleton if node.domain == "kv"] == ["Attention"] * 2
    engine = make_engine(tmp_path / "decoder", tmp_path / "bundle", FP16_POLICY)
    rng = np.random.default_rng(1)
    texts = [rng.integers(0, 64, length).tolist() for length in (5, 64, 70)]
    handles, logits = engine.prefill([text[:-3] for text in texts])
    steps = [logits] + [engine.decode(handles, [text[i] for text in texts]) for i in (-3, -2, -1)]
    for row, text in enumerate(texts):
        with torch.no_grad():
            expected = model(torch.tensor([text])).logits[0, -4:].numpy()
        scale = expected.std()
        np.testing.assert_allclose(steps[0][row], expected[0], atol=1e-4 * scale)
        # Past keys and values are float16 (relative 2**-11).
        np.testing.assert_allclose([step[row] for step in steps[1:]], expected[1:], atol=5e-3 * scale)


@pytest.mark.parametrize("config", [LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config])
def test_keys_that_a_config_leaves_out_mean_what_transformers_takes_them_for(config: type[PretrainedConfig]) -> None:
    defaults = inspect.signature(config.__init__).parameters
    assumed = DEFAULTS[config.model_type]
    assert {key: defaults[key].default for key in assumed} == assumed


def test_a_checkpoint_that_the_graph_cannot_express_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    checkpoint = save_model(MistralConfig(**SIZE, head_dim=16), tmp_path / "checkpoint")
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match="sliding_window=4096 is not supported"):
        export_decoder(checkpoint, tmp_path / "out", compute_dtype="float32", progress=nothing)
    assert not any((tmp_path / "out").iterdir())
