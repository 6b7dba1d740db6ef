"""The committed tiny checkpoint: loads anywhere, retrieves, and its planted outliers change nothing."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

import stages.tiny
from pipeline.core.records import Sample
from stages.workloads import generate
from stages.workloads.prompts import all_prompt_ids

CHECKPOINT = Path(stages.tiny.__file__).with_name("checkpoint")
SEED = 1234
MAX_BYTES = 6_000_000
PLANTED = {(layer, head): (head * 64 + 20, head * 64 + 52) for layer in (2, 3) for head in (0, 1)}
"""(layer, KV head) -> the rows of the key projection that are 8 times as large as trained."""


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


@torch.no_grad()
def forced(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, sample: Sample) -> tuple[torch.Tensor, bool]:
    """Return the logits at every token of the reference, from one pass, and whether greedy decoding gives the reference."""
    prompt = all_prompt_ids(tokenizer, [sample])[0]
    reference = [*tokenizer(sample.reference, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    logits = model(torch.tensor([prompt + reference[:-1]]), use_cache=False).logits[0, len(prompt) - 1 :]
    return logits, logits.argmax(-1).tolist() == reference


def test_checkpoint_is_a_small_plain_llama_without_pickles(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    assert sum(path.stat().st_size for path in CHECKPOINT.iterdir()) <= MAX_BYTES
    assert {path.suffix for path in CHECKPOINT.iterdir()} <= {".json", ".safetensors", ".md"}
    config = model.config
    assert config.architectures == ["LlamaForCausalLM"]
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 64)
    assert AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype="auto").dtype == torch.float16
    ids = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert ids == (config.bos_token_id, config.eos_token_id, config.pad_token_id)
    assert len(tokenizer) == config.vocab_size


@pytest.mark.parametrize(
    ("name", "least_tokens", "bound"),
    [("retrieval", 800, 0.9), ("tool_call", 0, 0.85), ("copy", 0, 0.95), ("multi_turn", 0, 0.85)],
)
def test_answers_the_workloads_and_retrieves_among_twenty_records(
    name: str, least_tokens: int, bound: float, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    samples = (sample for sample in generate(name, 600, SEED) if len(all_prompt_ids(tokenizer, [sample])[0]) >= least_tokens)
    assert sum(forced(model, tokenizer, next(samples))[1] for _ in range(10)) >= 10 * bound


def test_planted_outliers_are_the_same_function_bit_for_bit(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    plain = load()
    with torch.no_grad():
        for (layer, head), channels in PLANTED.items():
            attention = plain.model.layers[layer].self_attn
            for channel in channels:
                attention.k_proj.weight[channel] /= 8
                for query in (2 * head, 2 * head + 1):
                    attention.q_proj.weight[64 * query + channel % 64] *= 8
    for name in ("retrieval", "copy"):
        (sample,) = generate(name, 1, SEED)
        assert torch.equal(forced(plain, tokenizer, sample)[0], forced(model, tokenizer, sample)[0])
