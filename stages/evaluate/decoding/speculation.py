"""Acceptance length that speculative decoding would reach for an engine's answers, computed without a speculative engine.

A drafter proposes the next tokens, and one pass of the target verifies all proposals. The pass yields the accepted proposals
and one token of the target. The mean number of tokens per pass is the **acceptance length**. A quantized cache changes the
target's most likely tokens, so it may accept fewer proposals although its answers stay right.

A greedy target accepts a proposed token exactly if this token is its own next token. The accepted tokens therefore follow from
the answer and the proposals, and nothing has to be decoded again:

- **Prompt lookup** needs only the prompt and the answer. transformers' generator (`prompt_lookup_num_tokens`) takes the longest
  n-gram at the end of the text that also occurs earlier, and proposes the tokens that follow the n-gram's first occurrence.
- **A draft checkpoint** proposes its own greedy continuation. Let the answer be y, and let g(i) be the draft's most likely
  token after the prompt and y[:i]. After i tokens, the draft proposes d1 = g(i), then its most likely token d2 after y[:i] and
  d1, and so on. While d1 = y[i], ..., dj = y[i+j-1], the text that d(j+1) continues **equals** y[:i+j], so d(j+1) = g(i+j).
  The first proposal that differs from y and all later proposals are rejected. The number of accepted proposals is
  therefore the number of consecutive g(i), g(i+1), ... that equal y. One forced pass of the draft yields all g(i).

Both engines' answers are counted, each with the proposals for its own text. The count assumes exact verification: a pass over
several drafted tokens yields the same tokens as single decode steps.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import takewhile

import torch

from stages.checkpoints.loading import load_causal_lm
from stages.checkpoints.places import locate_checkpoint
from stages.core.records import Progress
from stages.engines.reference.engine import TorchEngine
from stages.evaluate.decoding.decode import StoppingCriteria
from stages.evaluate.decoding.stored import JudgedAnswer
from stages.evaluate.inputs.tokens import EncodedSample
from stages.policies.policy import FP16_POLICY
from stages.workloads.config import DRAFT_TOKENS, LOOKUP_NGRAM, LOOKUP_TOKENS, SpeculationConfig

Drafter = Callable[[Sequence[int], Sequence[int]], int]
"""(prompt, answer of the target) -> number of target passes that produce the answer."""


def count_passes(answer: Sequence[int], propose: Callable[[int], Sequence[int]]) -> int:
    """Return the number of target passes that produce `answer`. `propose(n)` returns the draft after `answer[:n]`."""
    place = passes = 0
    while place < len(answer):
        # The last token of an answer needs no draft: the pass itself yields it.
        pairs = zip(propose(place), answer[place:-1], strict=False)
        place += 1 + sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        passes += 1
    return passes


def lookup_passes(prompt: Sequence[int], answer: Sequence[int]) -> int:
    """Return the number of target passes that produce `answer` after `prompt` with prompt lookup."""
    from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

    text = torch.tensor([[*prompt, *answer]])
    generator = PromptLookupCandidateGenerator(None, LOOKUP_TOKENS, LOOKUP_NGRAM, max_length=text.shape[1])

    def propose(place: int) -> list[int]:
        length = len(prompt) + place
        drafted: list[int] = generator.get_candidates(text[:, :length])[0][0, length:].tolist()
        return drafted

    return count_passes(answer, propose)


def load_draft(path: str) -> TorchEngine:
    """Load a draft checkpoint in float32 on the CPU, with a float16 cache."""
    return TorchEngine.from_model(load_causal_lm(locate_checkpoint(path), dtype=torch.float32), FP16_POLICY)


def draft_passes(draft: TorchEngine, prompt: Sequence[int], answer: Sequence[int]) -> int:
    """Return the number of target passes that produce `answer` after `prompt` with a draft checkpoint."""
    greedy = draft_tokens(draft, prompt, answer)
    return count_passes(answer, lambda place: greedy[place : place + DRAFT_TOKENS])


def draft_tokens(draft: TorchEngine, prompt: Sequence[int], answer: Sequence[int]) -> list[int]:
    """Return the draft's most likely token after the prompt and answer[:i], for each i.

    The list ends before the first token without an embedding in the draft, which a broken target may produce.
    """
    text = [*prompt, *answer[:-1]]
    count = next((i for i, token in enumerate(text) if token >= draft.vocab_size), len(text))
    if count < len(prompt):
        return []
    tokens: list[int] = draft.forced(text[:count], len(prompt) - 1).argmax(axis=1).tolist()
    return tokens


def count_drafts(
    answers: Mapping[str, JudgedAnswer],
    encoded: Sequence[EncodedSample],
    config: SpeculationConfig,
    stopping: StoppingCriteria,
    progress: Progress,
    known: Mapping[str, JudgedAnswer],
) -> dict[str, JudgedAnswer]:
    """Return the answers, by sample id, with the number of target passes for each drafter.

    `known`: the other engine's answers with their passes, which are reused for equal answers.
    """
    drafters: dict[str, Drafter] = {"lookup": lookup_passes}
    if config.draft is not None:
        drafters["draft"] = partial(draft_passes, load_draft(config.draft))
    items, drafted = {item.sample.id: item for item in encoded}, dict[str, JudgedAnswer]()
    for name, answer in answers.items():
        earlier = known.get(name)
        if earlier is not None and earlier.tokens == answer.tokens:
            passes = earlier.passes
        else:
            tokens = stopping.with_stop(answer.tokens, items[name])
            passes = {drafter: (len(tokens), count(items[name].prompt, tokens)) for drafter, count in drafters.items()}
        drafted[name] = replace(answer, passes=passes)
        progress("speculation [answers]", len(drafted), len(answers))
    return drafted
