"""Free generation beside forced decode: `generate` must say what forced decode of its own words finds most likely.

Serving runs `generate`, an evaluation forces. Both go through one cache, so that what they say can differ by rounding alone. So
must an engine over prefixes that earlier requests left in its cache say what it says without them.
"""

from collections.abc import Sequence

import numpy as np

from pipeline.core.engine import Engine
from pipeline.core.errors import UserError
from pipeline.core.records import Progress, no_progress
from pipeline.verdict.coverage import FreeAnswers, ReusedPrefixes
from pipeline.verdict.record import finite
from stages.engines.base import Logits
from stages.evaluate.decoding.batches import Greedy
from stages.evaluate.distances.distance import kl_of_logits
from stages.evaluate.inputs.tokens import EncodedSample

TIE = 1e-2
"""Logits that are nearer to each other than this, relative to their standard deviation, may change places by rounding."""


def free_answers(
    engine: Engine,
    encoded: Sequence[EncodedSample],
    batch_size: int,
    greedy: Greedy,
    progress: Progress = no_progress,
    decoded: Sequence[Sequence[int] | None] = (),
) -> FreeAnswers:
    """Let an engine generate freely from the prompts of some samples, and force the same words one by one.

    An answer that decode steps have given already, word for word, is not forced: each of its words was the most likely one.

    Args:
        engine: The engine. No sequence is left in it.
        encoded: The samples in tokens.
        batch_size: Most prompts that are answered at once, two in three of them at most; the next one takes the place of one
            that has its answer.
        greedy: How answers end.
        progress: Called with the answers that were given or forced, and twice as many as there are samples.
        decoded: The answers of the same engine by decode steps; None where it gave none.
    """

    def update(done: int) -> None:
        if encoded:
            progress("free answers, then forced [answers]", done, 2 * len(encoded))

    update(0)
    limits = [greedy.limit(item) for item in encoded]
    prompts = [item.prompt for item in encoded]
    at_once = min(batch_size, max(1, 2 * len(encoded) // 3))  # some wait, and join
    try:
        answers = engine.generate(prompts, limits, greedy.stop_tokens, max_sequences=at_once, ended=update)
    except UserError as error:
        return FreeAnswers(samples=len(encoded), tokens=0, contradictions=[f"generate: {error}"])
    contradictions = []
    words = [greedy.said(answer, item) for item, answer in zip(encoded, answers, strict=True)]
    known = [greedy.words(answer) if answer is not None else None for answer in decoded] or [None] * len(encoded)
    # Requests of an engine that serves whole ones show no logits of the prompt, which say the first token.
    skipped = 1 if engine.can(Engine.forced_together) else 0
    left = [i for i, said in enumerate(words) if len(said) > skipped and answers[i] != known[i]]
    for begin in range(0, len(left), batch_size):
        together = left[begin : begin + batch_size]
        rows = _forced(engine, [(encoded[i].prompt, words[i][:-1]) for i in together])
        for done, (i, logits_BV) in enumerate(zip(together, rows, strict=True), 2 * len(encoded) - len(left) + begin):
            update(done)
            if len(words[i]) > len(answers[i]):  # `generate` does not tell which of the stop tokens ended an answer
                words[i][-1] = max(greedy.stop_tokens, key=logits_BV[-1].__getitem__)
            found = contradiction(engine, logits_BV, words[i][skipped:])
            if found is not None:
                first, gap = found
                contradictions.append(
                    f"sample {encoded[i].sample.id}: after {first + skipped} free tokens it said {words[i][first + skipped]}, "
                    f"which forced decode finds {gap:.2g} less likely (logits) than {int(logits_BV[first].argmax())}"
                )
    return FreeAnswers(samples=len(encoded), tokens=sum(map(len, answers)), contradictions=contradictions)


def behind(logits_BV: Logits, chosen: Sequence[int]) -> Logits:
    """Return how far the logit of each row's chosen token lies behind its largest, (B)."""
    of_chosen = np.take_along_axis(logits_BV, np.array(chosen)[:, None], axis=1)[:, 0]
    gaps: Logits = logits_BV.max(axis=1) - of_chosen
    return gaps


def contradiction(engine: Engine, logits_BV: Logits, chosen: Sequence[int]) -> tuple[int, float] | None:
    """Return the first row whose chosen token is not the most likely but for rounding, and how far behind; None without one."""
    gaps = behind(logits_BV, chosen)
    wrong = np.flatnonzero(~(gaps <= _tie(engine, logits_BV)))
    return (int(wrong[0]), float(gaps[wrong[0]])) if wrong.size else None


def _tie(engine: Engine, logits_BV: Logits) -> Logits:
    """Return how far behind the largest logit another one of each row may be and change places with it by rounding, (B)."""
    largest: Logits = np.maximum(TIE * logits_BV.std(axis=1), engine.logit_step * np.abs(logits_BV).max(axis=1))
    return largest


def _forced(engine: Engine, requests: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Logits]:
    """Return the logits (1 + len(tokens), V) of each request's prompt, and of decoding its tokens after it, one by one.

    An engine that serves whole requests shows those of the tokens alone.
    """
    if engine.can(Engine.forced_together):
        return engine.forced_together([([*prompt, *tokens], len(prompt)) for prompt, tokens in requests])
    handles, first_BV = engine.prefill([prompt for prompt, _ in requests])
    rows: list[list[Logits]] = [[logits_V.copy()] for logits_V in first_BV]
    try:
        for step in range(max(len(tokens) for _, tokens in requests)):
            live = [i for i, (_, tokens) in enumerate(requests) if step < len(tokens)]
            logits_BV = engine.decode([handles[i] for i in live], [requests[i][1][step] for i in live])
            for i, logits_V in zip(live, logits_BV, strict=True):
                rows[i].append(logits_V.copy())
    finally:
        engine.release(handles)
    return [np.stack(row) for row in rows]


def reused_prefixes(engine: Engine, encoded: Sequence[EncodedSample]) -> ReusedPrefixes | None:
    """Force samples after prompts that are prefilled, and after the same prompts taken from the cache.

    Args:
        engine: The engine. No sequence is left in it.
        encoded: The samples in tokens.

    Returns:
        How they differ; None for an engine that reuses no prefixes.
    """
    if not engine.can(Engine.forced_reusing) or not encoded:
        return None
    requests = [([*item.prompt, *item.reference[:-1]], len(item.prompt) - 1) for item in encoded]
    alone, reused = engine.forced_together(requests), engine.forced_reusing(requests)
    contradictions, largest = [], 0.0
    for item, exact, again in zip(encoded, alone, reused, strict=True):
        largest = float(np.maximum(largest, kl_of_logits(exact, again).max()))  # NaN stays NaN, which max() may drop
        chosen = again.argmax(axis=1).tolist()
        found = contradiction(engine, exact, chosen)
        if found is not None:
            first, gap = found
            contradictions.append(
                f"sample {item.sample.id}: over a reused prefix, token {first} is {chosen[first]}, which is {gap:.2g} less "
                "likely (logits) without it"
            )
    return ReusedPrefixes(
        samples=len(encoded), tokens=sum(map(len, alone)), kl_max=finite(largest), contradictions=contradictions
    )
