"""Runs samples on an engine (forced decode and answers) and converts the results to report rows.

The first Ctrl-C lets the samples in flight finish, the second stops at once (`interruption`).
"""

import signal
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import FrameType

import numpy as np

from stages.core.records import Progress
from stages.engines.interface import Engine
from stages.evaluate.decoding.batches import DecodeStep, Greedy
from stages.evaluate.decoding.decode import decode
from stages.evaluate.decoding.results import SampleResult
from stages.evaluate.distances.distance import Array, Distributions, Head, StepStatistics, compare_head
from stages.evaluate.distances.scores import Heads, SampleHeads, head_of
from stages.evaluate.inputs.checks import Judgement, judge
from stages.evaluate.inputs.tokens import BundleTokenizer, EncodedSample
from stages.verdict.record import finite
from stages.verdict.report import Acceptance, SampleRow
from stages.workloads.config import WorkloadsConfig

Done = Callable[[SampleResult], None]
"""Called with a sample's result, which includes the engine's own heads if they are recorded."""
Observer = Callable[[DecodeStep], None]


@dataclass(frozen=True)
class Answer:
    """A generated text and its judgement."""

    text: str
    judgement: Judgement
    tokens: tuple[int, ...] = ()
    """Tokens including the stop token; an answer that reached its limit has no stop token."""
    passes: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Drafter -> (tokens of the answer including the stop token, target passes that produce them)."""


def labelled(progress: Progress, prefix: str) -> Progress:
    """Return a progress callback that prepends a prefix to its labels."""
    return lambda label, done, total: progress(f"{prefix}{label}", done, total)


def greedy_of(tokenizer: BundleTokenizer, config: WorkloadsConfig) -> Greedy:
    """Return the end conditions of answers for a tokenizer and its configuration."""
    return Greedy(tokenizer.stop_tokens(config), config.extra_new_tokens)


def judged_answers(
    encoded: Sequence[EncodedSample], results: Sequence[SampleResult], tokenizer: BundleTokenizer, greedy: Greedy
) -> list[Answer | None]:
    """Judge the answers; return None for samples that are not judged."""
    answers: list[Answer | None] = []
    for item, result in zip(encoded, results, strict=True):
        if result.answer is None:
            answers.append(None)
        else:
            text = tokenizer.text(greedy.words(result.answer))
            answers.append(Answer(text, judge(item.sample, text), result.answer))
    return answers


class Interruption:
    """Flag that records whether the user requested an end."""

    requested = False


@contextmanager
def interruption() -> Iterator[Interruption]:
    """Record the first SIGINT or SIGTERM in the block without interrupting it; the second raises KeyboardInterrupt as usual.

    The end of the block raises KeyboardInterrupt if a signal was recorded, even if the block completed its work.

    Only signals that already raise KeyboardInterrupt are handled. For example, a background job ignores SIGINT, and SIGTERM may
    end the process of a library's user. In threads other than the main thread no signal is handled.
    """
    noted = Interruption()
    raising = [number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) is signal.default_int_handler]
    if threading.current_thread() is not threading.main_thread():
        raising = []

    def restore() -> None:
        for number in raising:
            signal.signal(number, signal.default_int_handler)

    def note(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        noted.requested = True
        restore()

    for number in raising:
        signal.signal(number, note)
    try:
        yield noted
    finally:
        restore()
    if noted.requested:
        raise KeyboardInterrupt


class Scorer:
    """Converts the steps of a forced decode to per-sample statistics."""

    def __init__(self, encoded: Sequence[EncodedSample], baseline: Heads | None, repeated: Collection[str] = ()) -> None:
        self.encoded, self.baseline, self.repeated = encoded, baseline, repeated
        self.in_flight: dict[int, StepStatistics] = {}
        self.heads: dict[int, SampleHeads] = {}
        """The baseline's heads by sample in flight; empty while the baseline itself is measured."""
        self.own: dict[int, list[Head]] = {}
        """The engine's own heads of samples in flight for which they are recorded."""

    def score(self, step: DecodeStep) -> None:
        """Compare the rows of a step with the baseline's heads; a baseline is compared with its own heads."""
        distributions = Distributions(step.logits_BV)
        for row, (i, position) in enumerate(zip(step.samples, step.positions, strict=True)):
            if i not in self.in_flight:
                self._begin(i)
            token = self.encoded[i].reference[position]
            if i in self.own:
                self.own[i].append(head_of(distributions, row, token))
            head = self.heads[i].head(position) if i in self.heads else self.own[i][position]
            self.in_flight[i].put_token(position, compare_head(head, distributions, row, token, step.greedy[row]))

    def finish(self, result: SampleResult) -> SampleResult:
        """Return the result of a finished sample with its scores."""
        self.heads.pop(result.sample, None)
        own = SampleHeads.of(self.own.pop(result.sample)) if result.sample in self.own else None
        return replace(result, statistics=self.in_flight.pop(result.sample), heads=own)

    def _begin(self, i: int) -> None:
        name = self.encoded[i].sample.id
        self.in_flight[i] = StepStatistics.empty(len(self.encoded[i].reference))
        if self.baseline is not None:
            self.heads[i] = self.baseline(name)
        if self.baseline is None or name in self.repeated:
            self.own[i] = []


@dataclass
class SampleRun:
    """Samples to run on an engine, and the results of the finished samples."""

    encoded: Sequence[EncodedSample]
    heads: Heads | None
    """The baseline's heads; None if the engine is the baseline, whose heads are recorded."""
    progress: Progress
    """Called with a label, the amount done, and the total."""
    greedy: Greedy | None = None
    """End conditions of answers; None if no answers are wanted."""
    results: dict[int, SampleResult] = field(default_factory=dict)
    """Results of finished samples by index; may include results of an interrupted measurement."""
    done: Done = lambda _: None
    """Called when a sample has finished."""
    interruption: Interruption = field(default_factory=Interruption)
    """Whether to finish the samples in flight and stop."""
    repeated: Collection[str] = ()
    """Ids of samples for which a candidate's own heads are recorded too."""

    @property
    def missing(self) -> list[int]:
        """Indices of unfinished samples."""
        return [i for i in range(len(self.encoded)) if i not in self.results]

    @property
    def tokens(self) -> tuple[int, int]:
        """Number of scored tokens in finished samples, and in all samples."""
        counts = [len(item.reference) for item in self.encoded]
        return sum(counts[i] for i in self.results), sum(counts)

    def finish(self, result: SampleResult) -> None:
        """Keep the result of a sample without its heads, because heads are large."""
        self.done(result)
        self.results[result.sample] = replace(result, heads=None)

    def whole(self) -> list[SampleResult]:
        """Return all results. Raises KeyboardInterrupt if samples are missing because the user requested an end."""
        if self.missing:
            raise KeyboardInterrupt
        return [self.results[i] for i in range(len(self.encoded))]


def run_samples(
    engine: Engine,
    run: SampleRun,
    batch_size: int,
    *,
    after_prefill: Callable[[], None] | None = None,
    one_pass: bool = True,
    observe: Observer | None = None,
) -> list[SampleResult]:
    """Run forced decode on every sample, compare its distributions with the baseline's, and generate the answers.

    Args:
        engine: The engine to drive.
        run: The samples.
        batch_size: Maximum sequences per decode step.
        after_prefill: See `decode`.
        one_pass: See `decode`.
        observe: Called with every step, while its sequences are live.

    Returns:
        The results in the order of the samples.

    Raises:
        KeyboardInterrupt: Samples are missing because the user requested an end.
    """
    noted, missing, (decoded, total) = run.interruption, run.missing, run.tokens
    scorer = Scorer(run.encoded, run.heads, run.repeated)
    events = decode(
        engine,
        run.encoded,
        batch_size,
        run.greedy,
        chosen=missing,
        after_prefill=after_prefill,
        one_pass=one_pass,
        stopping=lambda: noted.requested,
    )
    announced = False
    if missing:
        run.progress("forced decode [tokens]", decoded, total)
    for event in events:
        if noted.requested and not announced:
            announced = True
            run.progress(f"finishing {len(scorer.in_flight)} samples in flight; Ctrl-C again stops at once", 0, 0)
        if isinstance(event, DecodeStep):
            scorer.score(event)
            if observe is not None:
                observe(event)
            decoded += len(event.samples)
        else:
            run.finish(scorer.finish(event))
        if decoded < total:
            run.progress("forced decode [tokens]", decoded, total)
        else:
            run.progress("answers [samples]", len(run.results), len(run.encoded))
    return run.whole()


def _mean(values: Array) -> float | None:
    return finite(float(values.mean()))


def probability(nll: Array, item: EncodedSample) -> float:
    """Return the probability of the right answer: the product over its tokens, or the mean of this product over its results.

    Args:
        nll: Negative log-likelihood per scored token, in nats.
        item: The sample with the tokens that were scored.
    """
    parts = item.results or ((0, len(nll)),)
    return float(np.mean([np.exp(-nll[start:stop].sum()) for start, stop in parts]))


def _acceptance(baseline: Answer, candidate: Answer) -> dict[str, Acceptance]:
    """Return the acceptance by drafter, for drafters that both engines used."""
    return {
        name: Acceptance(
            baseline_tokens=baseline.passes[name][0],
            baseline_passes=baseline.passes[name][1],
            candidate_tokens=tokens,
            candidate_passes=passes,
        )
        for name, (tokens, passes) in candidate.passes.items()
        if name in baseline.passes
    }


def make_rows(
    encoded: Sequence[EncodedSample],
    statistics: Sequence[StepStatistics],
    baseline: Sequence[Answer | None],
    candidate: Sequence[Answer | None],
    rounds: Sequence[int],
) -> list[SampleRow]:
    """Build the rows of all samples, in order.

    Args:
        encoded: The samples with the tokens that were scored.
        statistics: Statistics of the scored tokens, by sample.
        baseline: The baseline's answers; None for samples that are not judged.
        candidate: The candidate's answers; None for samples that are not judged.
        rounds: Number of the round that ran the sample, by sample.
    """
    pooled = np.concatenate([steps.kl for steps in statistics])
    pooled = pooled[np.isfinite(pooled)]
    tail_floor = float(np.percentile(pooled, 99)) if len(pooled) else 0.0
    rows = []
    for item, steps, before, after, number in zip(encoded, statistics, baseline, candidate, rounds, strict=True):
        row = SampleRow(
            id=item.sample.id,
            workload=item.sample.workload,
            document=item.sample.cluster,
            context_tokens=len(item.prompt),
            depth=item.sample.depth,
            scored_tokens=len(item.reference),
            judged=after is not None,
            baseline_correct=before.judgement.correct if before else None,
            candidate_correct=after.judgement.correct if after else None,
            baseline_valid=before.judgement.valid if before else None,
            candidate_valid=after.judgement.valid if after else None,
            reference=item.sample.reference if after else None,
            baseline_generation=before.text if before else None,
            candidate_generation=after.text if after else None,
            mean_kl=_mean(steps.kl),
            max_kl=_mean(steps.kl.max(keepdims=True)),
            kl_tail=sorted(steps.kl[steps.kl > tail_floor].tolist(), reverse=True),
            baseline_nll=_mean(steps.baseline_nll),
            candidate_nll=_mean(steps.candidate_nll),
            top1_agreement=_mean(steps.top1),
            top10_overlap=_mean(steps.top10),
            mean_squared_delta_p=_mean(steps.delta_p**2),
            non_finite_steps=int((~np.isfinite(steps.kl)).sum()),
            difficulty=item.sample.difficulty,
            round=number,
            acceptance=_acceptance(before, after) if before and after else {},
            baseline_probability=finite(probability(steps.baseline_nll, item)) if item.judged else None,
            candidate_probability=finite(probability(steps.candidate_nll, item)) if item.judged else None,
            right_answer="baseline" if item.replaced else "reference",
        )
        rows.append(row)
    return rows


def unjudged_rows(encoded: Sequence[EncodedSample], results: Sequence[SampleResult]) -> list[SampleRow]:
    """Build the rows of samples without answers."""
    nothing = [None] * len(encoded)
    return make_rows(encoded, [result.statistics for result in results], nothing, nothing, [1] * len(encoded))
