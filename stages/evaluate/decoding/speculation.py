"""Acceptance length that speculative decoding would reach for an engine's answers, computed without a speculative engine.

A drafter proposes the next tokens, and one pass of the target verifies all proposals. The pass yields the accepted proposals
and one token of the target. The mean number of tokens per pass is the **acceptance length**. A quantized cache changes the
target's most likely tokens, so it may accept fewer proposals although its answers stay right.

A greedy target accepts a proposed token exactly if this token is its own next token. The accepted tokens therefore follow from
the answer and the proposals, and nothing has to be decoded again:

- **Prompt lookup** needs only the prompt and the answer, like `prompt_lookup_num_tokens` of transformers. It takes the longest
  n-gram at the end of the text that also occurs earlier, and proposes the tokens that follow the n-gram's first occurrence.
- **A draft checkpoint** proposes its own greedy continuation. Let the answer be y, and let g(i) be the draft's most likely
  token after the prompt and y[:i]. After i tokens, the draft proposes d1 = g(i), then its most likely token d2 after y[:i] and
  d1, and so on. While d1 = y[i], ..., dj = y[i+j-1], the text that d(j+1) continues **equals** y[:i+j], so d(j+1) = g(i+j).
  The first proposal that differs from y and all later proposals are rejected. The number of accepted proposals is
  therefore the number of consecutive g(i), g(i+1), ... that equal y. One forced pass of the draft yields all g(i).

Both engines' answers are counted, each with the proposals for its own text. The count assumes exact verification: a pass over
several drafted tokens yields the same tokens as single decode steps.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from stages.checkpoints.loading import load_causal_lm
from stages.checkpoints.places import locate_checkpoint
from stages.core.records import Progress
from stages.engines.reference.engine import TorchEngine
from stages.evaluate.decoding.batches import Greedy
from stages.evaluate.decoding.rows import Answer
from stages.evaluate.inputs.tokens import EncodedSample
from stages.policies.policy import FP16_POLICY
from stages.workloads.config import DRAFT_TOKENS, LOOKUP_NGRAM, LOOKUP_TOKENS, SpeculationConfig

Drafter = Callable[[Sequence[int], Sequence[int]], int]
"""(prompt, answer of the target) -> number of target passes that produce the answer."""


def lookup_passes(prompt: Sequence[int], said: Sequence[int], tokens: int, ngram: int) -> int:
    """Return the number of target passes that produce `said` after `prompt` with prompt lookup.

    `tokens`: maximum proposed tokens per pass; `ngram`: maximum length of the n-grams that are looked up.
    """
    text = [*prompt, *said]
    continued: dict[tuple[int, ...], int] = {}
    """N-gram -> index of the token that follows its first occurrence."""
    indexed, place, passes = 0, len(prompt), 0
    while place < len(text):
        for end in range(indexed + 1, place):
            for size in range(1, min(ngram, end) + 1):
                continued.setdefault(tuple(text[end - size : end]), end)
        indexed = max(indexed, place - 1)
        found = (continued.get(tuple(text[place - size : place])) for size in range(min(ngram, place - 1), 0, -1))
        start = next((start for start in found if start is not None), place)
        place += 1 + _agreeing(text[start : min(start + tokens, place)], text[place:-1])
        passes += 1
    return passes


def draft_passes(greedy: Sequence[int], said: Sequence[int], tokens: int) -> int:
    """Return the number of target passes that produce `said` if a draft proposes up to `tokens` tokens per pass.

    `greedy`: the draft's most likely token after the prompt and said[:i], for each i.
    """
    place = passes = 0
    while place < len(said):
        place += 1 + _agreeing(greedy[place : place + tokens], said[place:-1])
        passes += 1
    return passes


def _agreeing(proposed: Sequence[int], said: Sequence[int]) -> int:
    """Return the number of accepted tokens. It excludes the last token of an answer, which the pass itself yields."""
    return next(
        (i for i, (one, other) in enumerate(zip(proposed, said, strict=False)) if one != other), min(len(proposed), len(said))
    )


def load_draft(path: str) -> TorchEngine:
    """Load a draft checkpoint in float32 on the CPU, with a float16 cache."""
    return TorchEngine.from_model(load_causal_lm(locate_checkpoint(path), dtype=torch.float32), FP16_POLICY)


def draft_tokens(draft: TorchEngine, prompt: Sequence[int], said: Sequence[int]) -> list[int]:
    """Return the draft's most likely token after the prompt and said[:i], for each i.

    The list ends before the first token without an embedding in the draft, which a broken target may produce.
    """
    text = [*prompt, *said[:-1]]
    known = next((i for i, token in enumerate(text) if token >= draft.vocab_size), len(text))
    if known < len(prompt):
        return []
    tokens: list[int] = draft.forced(text[:known], len(prompt) - 1).argmax(axis=1).tolist()
    return tokens


def speculated(
    answers: Sequence[Answer | None],
    encoded: Sequence[EncodedSample],
    config: SpeculationConfig | None,
    greedy: Greedy,
    progress: Progress,
    known: Sequence[Answer | None] = (),
) -> list[Answer | None]:
    """Return the answers with the number of target passes for each drafter; unchanged without a configuration.

    `known` are the other engine's answers with their passes, which are reused for equal tokens.
    """
    if config is None:
        return list(answers)
    drafters: dict[str, Drafter] = {"lookup": lambda prompt, said: lookup_passes(prompt, said, LOOKUP_TOKENS, LOOKUP_NGRAM)}
    if config.draft is not None:
        draft = load_draft(config.draft)
        drafters["draft"] = lambda prompt, said: draft_passes(draft_tokens(draft, prompt, said), said, DRAFT_TOKENS)
    drafted = list(answers)
    for i, (answer, item) in enumerate(zip(answers, encoded, strict=True)):
        before = known[i] if known else None
        if answer is not None and before is not None and before.tokens == answer.tokens:
            drafted[i] = replace(answer, passes=before.passes)
        elif answer is not None:
            said = greedy.with_stop(answer.tokens, item)
            passes = {name: (len(said), count(item.prompt, said)) for name, count in drafters.items()}
            drafted[i] = replace(answer, passes=passes)
        progress("speculation [answers]", i + 1, len(answers))
    return drafted
