"""Servers by URL: one forced token a request over what earlier requests left in the prefix cache, and free answers.

What a server does not show is null in its records: no twin, no stress test, no memory. Its distributions show their most
likely tokens alone: two are coarsened to the same outcomes, each token that both servers show, and all others as one. No such
map raises the KL (the data processing inequality), so that the KL here is a lower bound of that over the vocabulary.
"""

import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.core.errors import MissingRequirement
from pipeline.core.records import Progress
from pipeline.core.workloads import LoadConfig, WorkloadsConfig
from pipeline.verdict.coverage import Exercised, FreeAnswers, Pressure
from pipeline.verdict.delivery import ServerSeen
from pipeline.verdict.record import finite
from pipeline.verdict.report import Canary, SystemMetrics
from stages.engines.openai.engine import OpenAIEngine, Shown
from stages.evaluate.decoding.batches import Greedy
from stages.evaluate.decoding.noise import canary_samples, noise_floor, repeated_samples
from stages.evaluate.decoding.results import SampleResult
from stages.evaluate.decoding.rows import Run, greedy_of, labelled, unjudged_rows
from stages.evaluate.decoding.stored import LOGPROBS, Once, read_round
from stages.evaluate.decoding.system import random_prompts
from stages.evaluate.distances.distance import TOP_K, Array, Head, StepStatistics
from stages.evaluate.distances.scores import SampleHeads, StoredHeads
from stages.evaluate.inputs.tokens import BundleTokenizer, EncodedSample

TIE = 0.5
"""Nats by which a free token may be less likely over a reused prefix: two last places of bfloat16 logits near 32."""


class Remote:
    """A server, as `stages.evaluate.measure` measures it: several samples are asked at once, each of them token by token."""

    def __init__(self, engine: OpenAIEngine, config: WorkloadsConfig) -> None:
        self.engine, self.together = engine, config.batch_size
        self.policy, self.vocab_size = engine.policy, engine.vocab_size
        self.not_finite = f"backend.baseline_url={engine.url}: shows numbers that are not finite"

    def run(self, run: Run) -> list[SampleResult]:
        """Ask the samples whose results are not known. Errors: `stages.evaluate.decoding.rows.run_samples`."""
        noted, missing, encoded = run.interruption, run.missing, run.encoded
        running: dict[Future[Asked], int] = {}
        stop = threading.Event()
        with ThreadPoolExecutor(self.together) as pool:
            try:
                while running or (missing and not noted.requested):
                    while missing and len(running) < self.together and not noted.requested:
                        i = missing.pop(0)
                        beside = None if run.heads is None else run.heads(encoded[i].sample.id)
                        running[pool.submit(ask, self.engine, encoded[i], beside, run.greedy, stop)] = i
                    for future in wait(running, return_when=FIRST_COMPLETED).done:
                        i, asked = running.pop(future), future.result()
                        kept = run.heads is None or encoded[i].sample.id in run.repeated
                        run.finish(i, asked.result, SampleHeads.of(asked.heads, self.vocab_size) if kept else None)
                    run.progress("forced tokens [tokens]", *run.tokens)
            except BaseException:
                stop.set()
                raise
        return run.whole()

    def seen(self, results: Sequence[SampleResult], _: Progress) -> dict[str, Any]:
        """Return what the server showed."""
        engine = self.engine
        shown = np.concatenate([result.seen for result in results if result.seen is not None])
        mass, prompts, cached = shown.T
        served = ServerSeen(
            url=engine.url,
            model=engine.model,
            release=engine.release,
            says=engine.says,
            tokens=len(shown),
            shown_mass=finite(float(mass.mean())),
            prompt_tokens=int(prompts.sum()),
            cached_tokens=int(cached.sum()) if np.isfinite(cached).all() else None,
        )
        return {"served": served}


@dataclass(frozen=True)
class Asked:
    """What came of one sample."""

    result: SampleResult
    heads: list[Head]
    """What the server shows, as a baseline's is stored."""
    contradiction: str | None
    """The first word of its free answer that it does not find likely when it is forced there."""


def ask(
    engine: OpenAIEngine, item: EncodedSample, heads: SampleHeads | None, greedy: Greedy | None, stop: threading.Event
) -> Asked:
    """Ask one sample: its free answer, and then its reference token by token.

    A request before the first scored one leaves the prompt in the prefix cache, because a prompt that is computed at once need
    not read what it stores.
    """
    count = len(item.reference)
    statistics, seen, own = StepStatistics.empty(count), np.full((count, 3), np.nan), []
    judged = greedy is not None and item.judged
    answer = engine.answer(item.prompt, greedy.limit(item), greedy.stop_tokens) if judged and greedy else None
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
            ends = (token for token in _likely(shown) if token in greedy.stop_tokens)
            said = answer[position] if position < len(answer) else next(ends, greedy.stop_tokens[0])
            behind = max(shown.logp.values()) - shown.logp.get(said, -np.inf)
            if not behind <= TIE:
                contradiction = (
                    f"sample {item.sample.id}: token {position} of its free answer is {said}, which over a reused prefix is "
                    f"{behind:.2g} nats less likely than another"
                )
            agrees = said == token and contradiction is None
    kept = None if answer is None else tuple(answer)
    result = SampleResult(statistics, kept, np.zeros(0), Exercised(), seen)
    return Asked(result, own, contradiction)


def once_served(
    engine: OpenAIEngine,
    encoded: Sequence[EncodedSample],
    tokenizer: BundleTokenizer,
    measured: Path,
    *,
    config: WorkloadsConfig,
    progress: Progress,
    baseline: Path | None = None,
    corrupted: OpenAIEngine | None = None,
) -> Once:
    """Measure what is measured of a server a single time. Arguments: `stages.evaluate.once.once`.

    `corrupted` is the server with a corrupted scale; None where there is none.
    """
    encoded = read_round(measured if baseline is None else baseline).scored(encoded)
    subset, greedy = repeated_samples(encoded, config), greedy_of(tokenizer, config)
    named = progress if baseline is not None else labelled(progress, "baseline: ")
    own, again = StoredHeads(measured / LOGPROBS).sample, []
    for done, item in enumerate(subset):  # one after the other
        named("noise floor [samples]", done, len(subset))
        again.append(ask(engine, item, own(item.sample.id), greedy, threading.Event()))
    results = [one.result for one in again]
    free = [result.answer for result in results if result.answer is not None]
    return Once(
        noise=noise_floor(results),
        free_answers=FreeAnswers(
            samples=len(free),
            tokens=sum(map(len, free)),
            contradictions=[one.contradiction for one in again if one.contradiction is not None],
        ),
        system=_system(engine, config.load, named),
        canary=None if baseline is None else _canary(corrupted, encoded, baseline, config, named),
        pressure=Pressure(asked=config.pressure) if config.pressure and baseline is not None else None,
        top_logprobs=engine.top_logprobs,
        canary_url=None if corrupted is None else corrupted.url,
    )


def _canary(
    engine: OpenAIEngine | None, encoded: Sequence[EncodedSample], baseline: Path, config: WorkloadsConfig, progress: Progress
) -> Canary:
    """Ask the corrupted server the samples with the longest prompts: as many as any must-fail control takes."""
    if engine is None:
        return Canary(factor=None, rows=[])
    subset = canary_samples(encoded, config)
    heads = StoredHeads(baseline / LOGPROBS).sample
    results = Remote(engine, config).run(Run(subset, heads, labelled(progress, "must-fail control: ")))
    return Canary(factor=None, rows=unjudged_rows(subset, results))


def _system(engine: OpenAIEngine, load: LoadConfig, progress: Progress) -> SystemMetrics:
    """Time the fixed load as a client sees it. Of the server's memory nothing is known."""
    progress("system metrics", 0, 1)
    times = engine.timed(random_prompts(load, engine.vocab_size), load.new_tokens)
    known = {
        "batch": load.batch,
        "context_tokens": load.context_tokens,
        "new_tokens": load.new_tokens,
        "time_to_first_token_ms": float(np.median(times.first_token_ms)),
        "decode_tokens_per_s": times.tokens_per_s,
        "budget_gib": load.budget_gib,
        "sequence_tokens": load.sequence_tokens,
    }
    return SystemMetrics.model_validate({**dict.fromkeys(SystemMetrics.model_fields), **known})


LEAST_REST = 1e-6
"""Probability below which what is left of shown ones is rounding: servers compute log-probabilities in float32."""


def head_of_shown(shown: Shown, token: int) -> Head:
    """Return what is stored of a distribution of the baseline; everything is NaN where a number is not finite.

    Args:
        shown: What the server shows; the forced token, which may be an unlikely one, is among it.
        token: The forced token.
    """
    likely = _likely(shown)
    logp = np.array([shown.logp[name] for name in likely], np.float64)
    if not np.isfinite(logp).all():
        return Head(np.zeros(1, np.uint32), np.full(1, np.nan, np.float32), np.nan, np.nan, None)
    rest = max(1.0 - float(np.exp(logp).sum()), LEAST_REST)
    return Head(np.array(likely, np.uint32), logp.astype(np.float32), rest, shown.logp[token], None)


def compare_shown(head: Head, shown: Shown, token: int) -> tuple[tuple[float, ...], float]:
    """Compare what a candidate shows with the baseline's head.

    Args:
        head: What is stored of the baseline.
        shown: What the candidate shows.
        token: The forced token.

    Returns:
        The values of StepStatistics, in its order, and the probability, by the baseline, of the tokens that both show.
    """
    likely = _likely(shown)
    if not np.isfinite([shown.logp[name] for name in likely]).all() or not np.isfinite(head.reference):
        return (np.nan, -head.reference, np.nan, np.nan, np.nan, np.nan), np.nan
    before = dict(zip(head.tokens.tolist(), head.logp.astype(np.float64).tolist(), strict=True))
    common = [name for name in before if name in shown.logp]
    p, mass = _coarse([before[name] for name in common])
    q, _ = _coarse([shown.logp[name] for name in common])
    kl = float((np.exp(p) * (p - q)).sum())
    ten = head.tokens[:TOP_K].tolist()
    reference = shown.logp[token]
    values = (
        max(kl, 0.0),
        -head.reference,
        -reference,
        float(ten[0] == likely[0]),
        len({*ten} & {*likely[:TOP_K]}) / len(ten),
        float(np.exp(reference) - np.exp(head.reference)),
    )
    return values, mass


def _likely(shown: Shown) -> list[int]:
    """Return the tokens, most likely first; the smaller id of equals."""
    return sorted(shown.logp, key=lambda name: (-shown.logp[name], name))


def _coarse(logp: list[float]) -> tuple[Array, float]:
    """Return log-probabilities of some tokens and of all others together, which sum to 1; and the probability of the former."""
    named = np.array(logp, np.float64)
    mass = float(np.exp(named).sum())
    outcomes = np.append(named, np.log(max(1.0 - mass, LEAST_REST)))
    return outcomes - np.log(np.exp(outcomes).sum()), min(mass, 1.0)
