"""Consistency of free generation with forced decode: each token from `generate` must be the most likely in forced decode.

Serving generates freely, whereas an evaluation forces tokens. Both use the same cache and may differ only by rounding.
"""

from collections.abc import Sequence

import numpy as np

from stages.core.errors import UserError
from stages.core.records import Progress, no_progress
from stages.engines.interface import Continuation, Engine, Logits, SupportsRequests
from stages.evaluate.decoding.decode import StoppingCriteria
from stages.evaluate.inputs.tokens import EncodedSample
from stages.verdict.report import FreeAnswers

TIE = 1e-2
"""Difference of two logits, relative to the row's standard deviation, below which rounding may swap their order."""


def free_answers(
    engine: Engine,
    encoded: Sequence[EncodedSample],
    batch_size: int,
    stopping: StoppingCriteria,
    progress: Progress = no_progress,
    decoded: Sequence[Sequence[int] | None] = (),
) -> FreeAnswers:
    """Generate answers to samples with `generate`, then check them with forced decode.

    An answer that equals its answer in `decoded` is not forced again, because its tokens are known to be the most likely.

    Args:
        batch_size: Maximum prompts that are answered together. At most two thirds of the samples start together, so that the
            others wait and join a running batch.
        decoded: Answers of the same engine from `decode`, by sample; None for a sample without an answer.
    """

    def update(done: int) -> None:
        if encoded:
            progress("free answers, then forced [answers]", done, 2 * len(encoded))

    ended = 0

    def count(requests: Sequence[Continuation]) -> None:
        nonlocal ended
        ended += len(requests)
        update(ended)

    update(ended)
    limits = [stopping.limit(item) for item in encoded]
    prompts = [item.prompt for item in encoded]
    max_sequences = min(batch_size, max(1, 2 * len(encoded) // 3))
    try:
        answers = engine.generate(prompts, limits, stopping.stop_tokens, max_sequences=max_sequences, ended=count)
    except UserError as error:
        return FreeAnswers(samples=len(encoded), tokens=0, contradictions=[f"generate: {error}"])
    contradictions = []
    complete = [stopping.with_stop(answer, item) for item, answer in zip(encoded, answers, strict=True)]
    earlier = [stopping.without_stop(answer) if answer is not None else None for answer in decoded] or [None] * len(encoded)
    # An engine that serves whole requests returns no logits for the prompt, so the first token cannot be checked.
    skipped = 1 if isinstance(engine, SupportsRequests) else 0
    remaining = [i for i, tokens in enumerate(complete) if len(tokens) > skipped and answers[i] != earlier[i]]
    for begin in range(0, len(remaining), batch_size):
        together = remaining[begin : begin + batch_size]
        rows = _force_tokens(engine, [(encoded[i].prompt, complete[i][:-1]) for i in together])
        for done, (i, logits_BV) in enumerate(zip(together, rows, strict=True), 2 * len(encoded) - len(remaining) + begin):
            update(done)
            if len(complete[i]) > len(answers[i]):  # `generate` does not return the stop token that ended an answer
                complete[i][-1] = max(stopping.stop_tokens, key=logits_BV[-1].__getitem__)
            mismatch = contradiction(engine, logits_BV, complete[i][skipped:])
            if mismatch is not None:
                first, gap = mismatch
                contradictions.append(
                    f"sample {encoded[i].sample.id}: token {first + skipped} of generate is {complete[i][first + skipped]}, "
                    f"which forced decode finds {gap:.2g} less likely (logits) than {int(logits_BV[first].argmax())}"
                )
    return FreeAnswers(samples=len(encoded), tokens=sum(map(len, answers)), contradictions=contradictions)


def contradiction(engine: Engine, logits_BV: Logits, chosen: Sequence[int]) -> tuple[int, float] | None:
    """Return the first row whose chosen token is not the most likely within rounding, and their logits' gap; else None."""
    gaps = logits_BV.max(axis=1) - np.take_along_axis(logits_BV, np.array(chosen)[:, None], axis=1)[:, 0]
    tie = np.maximum(TIE * logits_BV.std(axis=1), engine.logit_step * np.abs(logits_BV).max(axis=1))
    places = np.flatnonzero(~(gaps <= tie))
    return (int(places[0]), float(gaps[places[0]])) if places.size else None


def _force_tokens(engine: Engine, requests: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Logits]:
    """Return the logits (1 + len(tokens), V) per request: for the prompt, then for each token decoded after the prompt.

    An engine that serves whole requests returns no logits for the prompt: the shape is (len(tokens), V).
    """
    if isinstance(engine, SupportsRequests):
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
