"""Drives an engine over samples: forced decode, and the greedy answers, in one continuously refilled batch.

The last token of a prompt is decoded instead of prefilled. **Every** logit, the first one included, is therefore computed
by the decode path from the quantized cache. Logits of a prefill attend over fresh keys and values and say nothing about
the cache.

As long as every reference token was the most likely one, the greedy answer **is** the reference so far. Where forced decode
deviates from it for the first time, the sequence is forked there: the fork runs free to the answer, its origin goes on with
the reference. Engines that cannot fork generate deviating answers in a second pass.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from pipeline.core.engine import Engine
from pipeline.verdict.coverage import Exercised
from stages.evaluate.decoding.batches import (
    Batch,
    Finished,
    FreeBatch,
    Greedy,
    Logits,
    SharingBatch,
    Step,
    in_order,
    most_likely,
)
from stages.evaluate.inputs.tokens import EncodedSample

STEP_ROWS = 64
"""Rows of one step of a one-pass forced decode. The consumer of a step makes several copies of its logits."""


def decode(
    engine: Engine,
    encoded: Sequence[EncodedSample],
    batch_size: int,
    greedy: Greedy | None = None,
    *,
    chosen: Sequence[int] | None = None,
    after_prefill: Callable[[], None] | None = None,
    one_pass: bool = True,
    stopping: Callable[[], bool] = lambda: False,
) -> Iterator[Step | Finished]:
    """Yield the logits before every reference token of every sample, and each sample when it has finished.

    Args:
        engine: The engine to drive. No sequence of these samples is left in it.
        encoded: The samples in tokens.
        batch_size: Most sequences in one decode step.
        greedy: How the answers to judged samples end; None when no answers are wanted.
        chosen: Indices of the samples to run; None for all.
        after_prefill: Called after each prefill, before anything is decoded: the must-fail control corrupts the engine here.
            In a one-pass decode it is called first, so that later chunks of a long prompt see its effect as well.
        one_pass: Whether an engine that can do so computes each sample in one pass. Its logits are those of decoding
            token by token, but for rounding.
        stopping: Asked before samples are admitted: once it says yes, only those in flight are finished.
    """
    indices = range(len(encoded)) if chosen is None else chosen
    if one_pass and (engine.can(Engine.forced_together) or engine.can(Engine.forced)):
        events = _whole_samples(engine, encoded, indices, batch_size, after_prefill, stopping)
    elif _has_room(engine, batch_size):
        yield from SharingBatch(engine, encoded, batch_size, greedy, after_prefill, stopping).run(indices)
        return
    else:
        events = Batch(engine, encoded, batch_size, None, after_prefill, stopping).run(indices)
    yield from events if greedy is None else _then_answers(events, engine, encoded, batch_size, greedy)


def shares(engine: Engine, batch_size: int) -> bool:
    """Whether the prefixes of samples are prefilled once for all of them on this engine."""
    return not engine.can(Engine.forced) and _has_room(engine, batch_size)


def _has_room(engine: Engine, batch_size: int) -> bool:
    """Whether the engine forks, and holds a full batch, a fork of each of its sequences, and a document."""
    return engine.can(Engine.fork) and (engine.max_sequences is None or engine.max_sequences > 2 * batch_size)


def _whole_samples(
    engine: Engine,
    encoded: Sequence[EncodedSample],
    indices: Sequence[int],
    batch_size: int,
    after_prefill: Callable[[], None] | None,
    stopping: Callable[[], bool],
) -> Iterator[Step | Finished]:
    """Compute all positions of a sample at once: of one alone, or of as many requests in flight as a batch has sequences.

    The token after the last one fed is scored.
    """
    if after_prefill is not None:
        after_prefill()
    in_requests = engine.can(Engine.forced_together)
    size = batch_size if in_requests else 1
    indices = in_order(encoded, indices) if in_requests else indices
    for begin in range(0, len(indices), size):
        group = [(i, encoded[i]) for i in indices[begin : begin + size]]
        if stopping():
            return
        whole = [([*item.prompt, *item.reference[:-1]], len(item.prompt) - 1) for _, item in group]
        answers = engine.forced_together(whole) if in_requests else [engine.forced(*whole[0])]
        for number, ((i, item), logits_BV) in enumerate(zip(group, answers, strict=True)):
            if not in_requests:
                yield from _scored(i, item, logits_BV, Exercised())
                continue
            trace = Exercised()
            trace.step(len(item.prompt), len(item.reference) - 1, len(group))
            yield from _scored(i, item, logits_BV, trace, number)


def _scored(
    i: int, item: EncodedSample, logits_BV: Logits, trace: Exercised, request: int | None = None
) -> Iterator[Step | Finished]:
    """Yield the logits (reference tokens, V) of a whole sample in steps of STEP_ROWS, and the end of the sample."""
    count = len(item.reference)
    for first in range(0, count, STEP_ROWS):
        rows = range(first, min(first + STEP_ROWS, count))
        part = logits_BV[first : rows.stop]
        yield Step([i] * len(rows), list(rows), most_likely(part), part, request=request)
    yield Finished(i, None, trace)


def _then_answers(
    events: Iterator[Step | Finished], engine: Engine, encoded: Sequence[EncodedSample], batch_size: int, greedy: Greedy
) -> Iterator[Step | Finished]:
    """Pass forced decode on; generate the answers that deviate from the reference once all of it is done."""
    deviating: dict[int, Finished | None] = {}
    for event in events:
        if isinstance(event, Step):
            for i, position, token in zip(event.samples, event.positions, event.greedy, strict=True):
                if token != encoded[i].reference[position]:
                    deviating[i] = None
            yield event
        elif not encoded[event.sample].judged:
            yield event
        elif event.sample in deviating:
            deviating[event.sample] = event
        else:
            yield replace(event, answer=encoded[event.sample].reference)
    forced = {i: event for i, event in deviating.items() if event is not None}
    for event in FreeBatch(engine, encoded, batch_size, greedy).run(list(forced)):
        if isinstance(event, Finished):
            yield replace(event, trace=Exercised.merged([forced[event.sample].trace, event.trace]))
