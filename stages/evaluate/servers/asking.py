"""Asks servers samples: one forced token a request, over what earlier requests left in the prefix cache, and free answers."""

import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import numpy as np

from pipeline.artifacts.server import ServedEngine
from pipeline.core.errors import MissingRequirement
from pipeline.core.records import Progress
from stages.evaluate.decoding.batches import Greedy
from stages.evaluate.decoding.coverage import Trace
from stages.evaluate.decoding.interruption import Interruption
from stages.evaluate.decoding.results import ResultFolder, SampleResult
from stages.evaluate.distances.distance import Head, StepStatistics
from stages.evaluate.distances.scores import BaselineHeads, SampleHeads
from stages.evaluate.distances.shown import compare_shown, head_of_shown
from stages.evaluate.inputs.tokens import EncodedSample

TIE = 0.5
"""Nats by which a free token may be less likely over a reused prefix: two last places of bfloat16 logits near 32."""


@dataclass(frozen=True)
class Asked:
    """What came of one sample."""

    result: SampleResult
    heads: list[Head]
    """What the server shows, as a baseline's is stored."""
    contradiction: str | None
    """The first word of its free answer that it does not find likely when it is forced there."""


def run_served(
    engine: ServedEngine,
    encoded: Sequence[EncodedSample],
    baseline: BaselineHeads | None,
    together: int,
    progress: Progress,
    greedy: Greedy | None,
    folder: ResultFolder,
    noted: Interruption,
) -> list[SampleResult]:
    """Ask a server every sample, several at once, each of them token by token.

    Args:
        engine: The server.
        encoded: The samples in tokens.
        baseline: The baseline's heads of these; None where the server is the baseline, whose heads are saved.
        together: Samples that are asked at once.
        progress: Called with what is being done, and how much of how much.
        greedy: How answers end; None when none are wanted.
        folder: Where results are saved at once, and taken from where they are there already.
        noted: Asked whether to finish the samples in flight and stop.

    Raises:
        KeyboardInterrupt: Samples are missing, because an end was asked for.
    """
    results = folder.load()
    missing = [i for i in range(len(encoded)) if i not in results]
    total = sum(len(item.reference) for item in encoded)
    running: dict[Future[Asked], int] = {}
    stop = threading.Event()
    with ThreadPoolExecutor(together) as pool:
        try:
            while running or (missing and not noted.requested):
                while missing and len(running) < together and not noted.requested:
                    i = missing.pop(0)
                    heads = None if baseline is None else baseline.sample(encoded[i].sample.id)
                    running[pool.submit(ask, engine, encoded[i], heads, greedy, stop)] = i
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    i, asked = running.pop(future), future.result()
                    own = SampleHeads.of(asked.heads, engine.vocab_size) if baseline is None else None
                    folder.save(i, asked.result, own)
                    results[i] = asked.result
                progress("forced tokens [tokens]", sum(len(encoded[i].reference) for i in results), total)
        except BaseException:
            stop.set()
            raise
    if len(results) < len(encoded):
        raise KeyboardInterrupt
    return [results[i] for i in range(len(encoded))]


def ask(
    engine: ServedEngine, item: EncodedSample, heads: SampleHeads | None, greedy: Greedy | None, stop: threading.Event
) -> Asked:
    """Ask one sample: its free answer, and then its reference token by token.

    A request before the first scored one leaves the prompt in the prefix cache, because a prompt that is computed at once need
    not read what it stores.
    """
    count = len(item.reference)
    statistics, seen, own = StepStatistics.empty(count), np.full((count, 3), np.nan), []
    judged = greedy is not None and item.judged
    answer = engine.answer(item.prompt, count + greedy.extra_tokens, greedy.stop_token) if judged and greedy else None
    contradiction, agrees = None, True
    if answer is None:
        engine.forced(item.prompt, item.reference[0])
    for position, token in enumerate(item.reference):
        if stop.is_set():
            raise MissingRequirement("another sample ended this one")
        shown = engine.forced([*item.prompt, *item.reference[:position]], token)
        head = head_of_shown(shown, token)
        values, mass = compare_shown(head if heads is None else heads.head(position), shown, token)
        statistics.put_token(position, values)
        seen[position] = mass, shown.prompt_tokens, np.nan if shown.cached_tokens is None else shown.cached_tokens
        own.append(head)
        if answer is not None and agrees and greedy is not None:
            said = answer[position] if position < len(answer) else greedy.stop_token
            behind = max(shown.logp.values()) - shown.logp.get(said, -np.inf)
            if not behind <= TIE:
                contradiction = (
                    f"sample {item.sample.id}: token {position} of its free answer is {said}, which over a reused prefix is "
                    f"{behind:.2g} nats less likely than another"
                )
            agrees = said == token and contradiction is None
    kept = None if answer is None else tuple(answer)
    result = SampleResult(statistics, kept, len(item.prompt), count, np.zeros((0, 2)), Trace(), seen)
    return Asked(result, own, contradiction)
