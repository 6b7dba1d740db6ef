"""The committed tiny checkpoint: loads anywhere, retrieves, and its planted outliers change nothing."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from pipeline.core.records import Sample
from stages.tiny.batches import render
from stages.tiny.outliers import OUTLIERS, plant_outliers, remove_outliers
from stages.tiny.scores import CHECKPOINT, exact_match, force
from stages.workloads import generate
from stages.workloads.prompts import prompt_ids

SEED = 1234
MAX_BYTES = 6_000_000


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(CHECKPOINT)


def load() -> LlamaForCausalLM:
    return AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return load()


def test_checkpoint_is_a_small_plain_llama_without_pickles(model: LlamaForCausalLM) -> None:
    assert sum(path.stat().st_size for path in Path(CHECKPOINT).iterdir()) <= MAX_BYTES
    assert {path.suffix for path in Path(CHECKPOINT).iterdir()} <= {".json", ".safetensors", ".md"}
    config = model.config
    assert config.architectures == ["LlamaForCausalLM"]
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 64)
    assert config.tie_word_embeddings
    assert AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype="auto").dtype == torch.float16


def test_special_ids_agree_between_config_and_tokenizer(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    config = model.config
    ids = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert ids == (config.bos_token_id, config.eos_token_id, config.pad_token_id)
    assert tokenizer.eos_token == "<|end|>"
    assert len(tokenizer) == config.vocab_size


@pytest.mark.parametrize("name", ["retrieval", "tool_call", "copy", "multi_turn"])
def test_chat_template_renders_what_training_rendered(name: str, tokenizer: PreTrainedTokenizerFast) -> None:
    for sample in generate(name, 5, SEED):
        conversation = [*sample.messages, ("assistant", sample.reference)]
        trained = tokenizer(render(conversation), add_special_tokens=False)["input_ids"]
        prompt = prompt_ids(tokenizer, sample)
        reference = tokenizer(sample.reference, add_special_tokens=False)["input_ids"]
        assert prompt + reference + [tokenizer.eos_token_id] == trained
        assert tokenizer.decode(reference) == sample.reference


def long_retrieval(tokenizer: PreTrainedTokenizerFast, count: int) -> list[Sample]:
    """Prompts of 800 tokens and more."""
    samples = (sample for sample in generate("retrieval", 600, SEED) if len(prompt_ids(tokenizer, sample)) >= 800)
    return [next(samples) for _ in range(count)]


def test_retrieves_among_twenty_records_in_a_thousand_tokens(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    assert exact_match(model, tokenizer, long_retrieval(tokenizer, 10)) >= 0.90


@pytest.mark.parametrize(("name", "bound"), [("tool_call", 0.85), ("copy", 0.95), ("multi_turn", 0.85)])
def test_answers_the_other_workloads(
    name: str, bound: float, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    assert exact_match(model, tokenizer, generate(name, 12, SEED)) >= bound


def test_planted_outliers_are_the_same_function_bit_for_bit(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    assert OUTLIERS
    plain = load()
    remove_outliers(plain)
    channel_amax = plain.model.layers[OUTLIERS[0].layer].self_attn.k_proj.weight.abs().amax(-1)
    planted_amax = model.model.layers[OUTLIERS[0].layer].self_attn.k_proj.weight.abs().amax(-1)
    assert not torch.equal(channel_amax, planted_amax)
    for name in ("retrieval", "copy", "prose"):
        for sample in generate(name, 1, SEED):
            assert torch.equal(force(plain, tokenizer, sample).logits_NV, force(model, tokenizer, sample).logits_NV)
    plant_outliers(plain)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True))
