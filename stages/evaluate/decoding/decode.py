"""Runs forced decode and greedy answers for samples on an engine, in one continuous batch.

The last token of a prompt is decoded instead of prefilled, so that the decode path computes **every** logit, including the
first, from the quantized cache. A prefill attends over fresh keys and values, and its logits do not depend on the cache.

While every reference token is also the most likely token, the greedy answer **equals** the reference. At the first
difference, the sequence is forked: the fork generates the answer freely, and the original continues with the reference.
Without forks, or after a one-pass decode, a second pass generates the differing answers.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from stages.engines.interface import Engine, SupportsForced, SupportsFork, SupportsRequests
from stages.evaluate.decoding.batches import Batch, DecodeStep, StoppingCriteria, greedy_tokens, sort_by_length
from stages.evaluate.decoding.results import SampleResult
from stages.evaluate.inputs.tokens import EncodedSample
from stages.verdict.coverage import Exercised

STEP_ROWS = 64
"""Maximum rows per step of a one-pass forced decode. Limits memory: the consumer of a step copies its logits several times."""


def decode(
    engine: Engine,
    encoded: Sequence[EncodedSample],
    batch_size: int,
    stopping: StoppingCriteria | None = None,
    *,
    chosen: Sequence[int] | None = None,
    after_prefill: Callable[[], None] | None = None,
    one_pass: bool = True,
) -> Iterator[DecodeStep | SampleResult]:
    """Yield the logits that predict each reference token, and each sample once it has finished.

    The engine holds none of the sequences afterwards.

    Args:
        stopping: End conditions of the answers to judged samples; None if no answers are wanted.
        chosen: Indices of the samples to run; None for all.
        after_prefill: Called between a prefill and the next decode step: the must-fail control corrupts the engine here.
            A one-pass decode calls it first, so that it also affects the later chunks of a long prompt.
        one_pass: Whether to compute each sample in one pass if the engine can. The logits equal the logits of token-by-token
            decoding up to rounding.
    """
    indices = range(len(encoded)) if chosen is None else chosen
    if one_pass and isinstance(engine, SupportsRequests | SupportsForced):
        events = _decode_in_one_pass(engine, encoded, indices, batch_size, after_prefill)
    elif _has_room(engine, batch_size):
        return Batch(engine, encoded, batch_size, stopping, after_prefill, can_fork=True).run(indices)
    else:
        events = Batch(engine, encoded, batch_size, None, after_prefill).run(indices)
    return events if stopping is None else _add_answers(events, engine, encoded, batch_size, stopping)


def shares(engine: Engine, batch_size: int) -> bool:
    """Return whether `decode` prefills a prefix once for all samples that share it."""
    return not isinstance(engine, SupportsForced) and _has_room(engine, batch_size)


def _has_room(engine: Engine, batch_size: int) -> bool:
    """Return whether the engine can fork and has room for a full batch, a fork per sequence, and a document."""
    return isinstance(engine, SupportsFork) and (engine.max_sequences is None or engine.max_sequences > 2 * batch_size)


def _decode_in_one_pass(
    engine: Engine,
    encoded: Sequence[EncodedSample],
    indices: Sequence[int],
    batch_size: int,
    after_prefill: Callable[[], None] | None,
) -> Iterator[DecodeStep | SampleResult]:
    """Compute all positions of a sample in one pass. The last reference token is scored but not fed.

    An engine that serves whole requests computes up to `batch_size` samples together, other engines one at a time.
    """
    if after_prefill is not None:
        after_prefill()
    in_requests = isinstance(engine, SupportsRequests)
    size = batch_size if in_requests else 1
    indices = sort_by_length(encoded, indices) if in_requests else indices
    for begin in range(0, len(indices), size):
        group = [(i, encoded[i]) for i in indices[begin : begin + size]]
        requests = [([*item.prompt, *item.reference[:-1]], len(item.prompt) - 1) for _, item in group]
        if isinstance(engine, SupportsRequests):
            logits = engine.forced_together(requests)
        else:
            assert isinstance(engine, SupportsForced)
            logits = [engine.forced(*requests[0])]
        for number, ((i, item), logits_BV) in enumerate(zip(group, logits, strict=True)):
            trace = Exercised()
            request = number if in_requests else None
            if in_requests:
                # The library may compute fewer requests together than it receives.
                trace.note_step(len(item.prompt), len(item.reference) - 1, min(len(group), engine.max_batch or len(group)))
            for first in range(0, len(item.reference), STEP_ROWS):
                part = logits_BV[first : first + STEP_ROWS]
                positions = list(range(first, first + len(part)))
                yield DecodeStep([i] * len(part), positions, greedy_tokens(part), part, request=request)
            yield SampleResult(i, None, trace)


def _add_answers(
    events: Iterator[DecodeStep | SampleResult],
    engine: Engine,
    encoded: Sequence[EncodedSample],
    batch_size: int,
    stopping: StoppingCriteria,
) -> Iterator[DecodeStep | SampleResult]:
    """Yield the forced-decode events, then generate the answers that differ from the reference."""
    deviating, forced = set[int](), dict[int, SampleResult]()
    for event in events:
        if isinstance(event, DecodeStep):
            rows = zip(event.samples, event.positions, event.greedy, strict=True)
            deviating |= {i for i, position, token in rows if token != encoded[i].reference[position]}
            yield event
        elif not encoded[event.sample].sample.judged:
            yield event
        elif event.sample in deviating:
            forced[event.sample] = event
        else:
            yield replace(event, answer=encoded[event.sample].reference)
    for event in Batch(engine, encoded, batch_size, stopping, free=True).run(list(forced)):
        if isinstance(event, SampleResult):
            yield replace(event, trace=Exercised.merged([forced[event.sample].trace, event.trace]))
