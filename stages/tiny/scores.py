"""Scores the checkpoint by forcing the references: `python -m stages.tiny.scores [DIR]`.

Greedy decode gives the reference exactly when every reference token is the argmax, so that no answer has to be generated.

Legend: N = tokens of the reference, V = vocab_size.
"""

import argparse
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from pipeline.core.records import Sample
from stages.workloads import generate
from stages.workloads.prompts import prompt_ids

CHECKPOINT = Path(__file__).with_name("checkpoint")
SEED = 1234
RETRIEVAL_BINS = (0, 400, 600, 800, 1024)
"""Edges of the bins in tokens of the prompt."""


@dataclass(frozen=True)
class Forced:
    """The model's logits on the reference of one sample."""

    prompt_tokens: int
    logits_NV: Tensor
    """In float32. For chat samples the end-of-turn token counts as a token of the reference."""
    targets_N: Tensor
    """Token ids of the reference."""

    @property
    def exact(self) -> bool:
        """Whether greedy decode would give the reference."""
        return bool((self.logits_NV.argmax(-1) == self.targets_N).all())

    @property
    def nll(self) -> float:
        """Negative log-likelihood of the whole reference, in nats."""
        return torch.nn.functional.cross_entropy(self.logits_NV, self.targets_N, reduction="sum").item()


@torch.no_grad()
def force(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, sample: Sample) -> Forced:
    """Run a sample through the model in one pass and return its logits at every token of the reference."""
    prompt = prompt_ids(tokenizer, sample)
    reference = list(tokenizer(sample.reference, add_special_tokens=False)["input_ids"])
    if sample.messages:
        reference.append(tokenizer.eos_token_id)
    ids = torch.tensor([prompt + reference])
    hidden = model.model(ids[:, :-1], use_cache=False).last_hidden_state[0, len(prompt) - 1 :]
    return Forced(len(prompt), model.lm_head(hidden).float(), ids[0, len(prompt) :])


def exact_match(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, samples: Sequence[Sample]) -> float:
    """Return the share of samples that greedy decode answers exactly, from 0 to 1."""
    return sum(force(model, tokenizer, sample).exact for sample in samples) / len(samples)


def perplexity(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, samples: Sequence[Sample]) -> float:
    """Return the perplexity of the references, per token."""
    forced = [force(model, tokenizer, sample) for sample in samples]
    return math.exp(sum(f.nll for f in forced) / sum(len(f.targets_N) for f in forced))


def main() -> None:
    """Print exact match on held-out samples, retrieval by prompt length, and the perplexity of prose."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("checkpoint", type=Path, nargs="?", default=CHECKPOINT)
    checkpoint = parser.parse_args().checkpoint
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    retrieval = [force(model, tokenizer, sample) for sample in generate("retrieval", 1200, SEED)]
    for low, high in itertools.pairwise(RETRIEVAL_BINS):
        answers = [forced.exact for forced in retrieval if low <= forced.prompt_tokens < high]
        print(f"retrieval, {low}-{high} tokens: {sum(answers) / len(answers):.3f} of {len(answers)}")
    for name in ("tool_call", "copy", "multi_turn"):
        print(f"{name}: {exact_match(model, tokenizer, generate(name, 300, SEED)):.3f} of 300")
    print(f"prose perplexity: {perplexity(model, tokenizer, generate('prose', 40, SEED)):.3f}")


if __name__ == "__main__":
    main()
