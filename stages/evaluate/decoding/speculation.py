"""What speculative decoding would make of an engine's answers: tokens a pass, without a speculative engine.

A drafter proposes the next tokens, one pass of the target verifies them all, and the pass says as many of them as the target
would have said itself, and then one token of the target's own. The mean of that is the **acceptance length**. A quantized
cache changes what a target finds most likely, so that it may accept less although its answers stay right.

A greedy target accepts a proposed token exactly if it is its own next token, so that what it accepts follows from its answer
and from the proposals. Nothing has to be decoded again:

- **Prompt lookup** proposes from the text so far alone, as `prompt_lookup_num_tokens` of transformers does: the longest of the
  last n-grams that stands earlier in prompt and answer, where it stands first, and the tokens after it there.
- **A draft checkpoint** proposes its own greedy continuation. Let the answer be y, and g(i) what the draft finds most likely
  after the prompt and y[:i]. After i tokens it proposes d1 = g(i); d2 is what it finds most likely after y[:i] and d1, and so
  on. As long as d1 = y[i], ..., dj = y[i+j-1], the text that d(j+1) continues **is** y[:i+j], so that d(j+1) = g(i+j). The
  first proposal that differs from y is rejected with all after it, which therefore never matter. So the number of accepted
  ones is the number of consecutive g(i), g(i+1), ... that equal y there, and one forced pass of the draft over the answer has
  them all.

Both engines' answers are counted, each with the proposals for its own text. A pass over several drafted tokens is taken to say
what decode steps say one by one: that is what an exact verification is.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from pipeline.checkpoint.places import locate_checkpoint
from pipeline.core.engine import Engine
from pipeline.core.kv import FP16_POLICY
from pipeline.core.records import Progress
from pipeline.core.workloads import SpeculationConfig
from pipeline.verdict.coverage import Speculated
from stages.checkpoints import load_causal_lm
from stages.engines.oracle.engine import OracleEngine
from stages.evaluate.decoding.batches import Greedy
from stages.evaluate.decoding.rows import Answer
from stages.evaluate.inputs.tokens import EncodedSample

Drafter = Callable[[Sequence[int], Sequence[int]], int]
"""(prompt, what the target says after it) -> the passes of the target that say it."""


def lookup_passes(prompt: Sequence[int], said: Sequence[int], tokens: int, ngram: int) -> int:
    """Return the passes that say `said` after `prompt` where prompt lookup drafts.

    Args:
        prompt: Tokens before the answer.
        said: The target's greedy tokens, at least one.
        tokens: Most tokens that are proposed for a pass.
        ngram: Most of the last tokens that are searched for.
    """
    text = [*prompt, *said]
    continued: dict[tuple[int, ...], int] = {}
    """N-gram -> where the text goes on after the first one of it that has anything after it."""
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
    """Return the passes that say `said` where a draft checkpoint proposes.

    Args:
        greedy: What the draft finds most likely after the prompt and said[:i], for each i.
        said: The target's greedy tokens, at least one.
        tokens: Most tokens that are proposed for a pass.
    """
    place = passes = 0
    while place < len(said):
        place += 1 + _agreeing(greedy[place : place + tokens], said[place:-1])
        passes += 1
    return passes


def _agreeing(proposed: Sequence[int], said: Sequence[int]) -> int:
    """Return how many tokens are accepted. The last of an answer is never one of them: the pass itself says one more."""
    return next(
        (i for i, (one, other) in enumerate(zip(proposed, said, strict=False)) if one != other), min(len(proposed), len(said))
    )


class Draft:
    """A draft checkpoint in float32 on the CPU, with a float16 cache."""

    def __init__(self, path: str) -> None:
        model = load_causal_lm(locate_checkpoint(path), dtype=torch.float32)
        self.engine = OracleEngine.from_model(model, FP16_POLICY)

    def greedy(self, prompt: Sequence[int], said: Sequence[int]) -> list[int]:
        """Return what the draft finds most likely after the prompt and said[:i], for each i.

        It is empty from where the text holds a token that the draft has no embedding for, as a broken target may say it.
        """
        text = [*prompt, *said[:-1]]
        known = next((i for i, token in enumerate(text) if token >= self.engine.vocab_size), len(text))
        if known < len(prompt):
            return []
        tokens: list[int] = self.engine.forced(text[:known], len(prompt) - 1).argmax(axis=1).tolist()
        return tokens


def speculated(
    answers: Sequence[Answer | None],
    encoded: Sequence[EncodedSample],
    config: SpeculationConfig | None,
    greedy: Greedy,
    progress: Progress,
    known: Sequence[Answer | None] = (),
) -> list[Answer | None]:
    """Return the answers with the passes that say them under each drafter.

    Args:
        answers: An engine's greedy answers; None where there is none.
        encoded: The samples in tokens.
        config: The drafters; None leaves the answers as they are.
        greedy: How answers end.
        progress: Called with a label, the answers done, and the answers in all.
        known: The other engine's answers with theirs, which hold for the same tokens.
    """
    if config is None:
        return list(answers)
    drafters = _drafters(config)
    drafted = list(answers)
    for i, (answer, item) in enumerate(zip(answers, encoded, strict=True)):
        before = known[i] if known else None
        if answer is not None and before is not None and before.tokens == answer.tokens:
            drafted[i] = replace(answer, passes=before.passes)
        elif answer is not None:
            said = greedy.said(answer.tokens, item)
            passes = {name: (len(said), count(item.prompt, said)) for name, count in drafters.items()}
            drafted[i] = replace(answer, passes=passes)
        progress("speculation [answers]", i + 1, len(answers))
    return drafted


def speculated_by(
    engine: Engine,
    answers: Sequence[Answer | None],
    encoded: Sequence[EncodedSample],
    config: SpeculationConfig | None,
    greedy: Greedy,
) -> Speculated | None:
    """Return what an engine's own prompt lookup makes of its answers; None for an engine without, or none asked.

    The engine drafts from its first token on, not from the prompt alone, and is counted alike.
    """
    pairs = zip(answers, encoded, strict=True)
    asked = [(item.prompt, greedy.said(answer.tokens, item)) for answer, item in pairs if answer is not None]
    if config is None or not config.lookup_tokens or not asked or not engine.can(Engine.drafting):
        return None
    seen = engine.drafting([(prompt, len(said)) for prompt, said in asked], config.lookup_tokens, config.ngram)
    counted = 0
    for (prompt, _), answer in zip(asked, seen.answers, strict=True):
        counted += 1
        if len(answer) > 1:
            counted += lookup_passes([*prompt, answer[0]], answer[1:], config.lookup_tokens, config.ngram)
    return Speculated(
        requests=len(asked),
        same=sum(answer == list(said) for answer, (_, said) in zip(seen.answers, asked, strict=True)),
        tokens=sum(map(len, seen.answers)),
        passes=sum(seen.passes),
        counted_passes=counted,
        drafts=seen.drafts,
        drafted=seen.drafted,
        accepted=seen.accepted,
    )


def _drafters(config: SpeculationConfig) -> dict[str, Drafter]:
    """Return what counts the passes, by the drafter's name."""
    drafters: dict[str, Drafter] = {}
    if config.lookup_tokens:
        drafters["lookup"] = lambda prompt, said: lookup_passes(prompt, said, config.lookup_tokens, config.ngram)
    if config.draft is not None:
        draft = Draft(config.draft)
        drafters["draft"] = lambda prompt, said: draft_passes(draft.greedy(prompt, said), said, config.draft_tokens)
    return drafters
