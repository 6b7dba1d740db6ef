"""Measurement of policies on the decode path of the one-pass oracle, against the same model with a float16 cache.

Intervals are 95 % bootstrap intervals by document. KL is in nats per scored token.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import numpy.typing as npt
from transformers import LlamaForCausalLM

from benchmarks.numerics.scales import CachedStates, kv_scales
from benchmarks.numerics.store import Store
from benchmarks.numerics.subject import Text
from pipeline.core.kv import FP16_POLICY, KVPolicy, KVShape
from pipeline.core.records import Progress
from pipeline.statistics.bootstrap import resampled_sums
from stages.engines.oracle.engine import OracleEngine
from stages.evaluate.distances.distance import Array, StepStatistics, compare, log_softmax

ROWS = 256
"""Rows of logits that are compared at a time."""

LEAST_KL = 1e-9
"""Floor of a document's mean KL in ratios; what is below it is noise of float32 logits."""


@dataclass(frozen=True)
class Interval:
    """An estimate with its 95 % interval."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, value: float, replicates: Array) -> "Interval":
        """Return the interval of an estimate from its bootstrap replicates (n,)."""
        low, high = np.percentile(replicates, [2.5, 97.5]).tolist()
        return cls(value, low, high)


@dataclass(frozen=True)
class Measurement:
    """Result of one policy on one model: one element of `steps` per text, in the order of the texts."""

    policy: KVPolicy
    shape: KVShape
    texts: Sequence[Text]
    steps: Sequence[StepStatistics]

    @property
    def bytes_per_token(self) -> int:
        """Bytes of the cache per token, all layers."""
        return self.policy.bytes_per_token(self.shape)

    @cached_property
    def document_kl(self) -> Array:
        """Mean KL of every document, (documents,)."""
        return np.array([step.kl.mean() for step in self.steps])

    @cached_property
    def mean_kl(self) -> Interval:
        """Mean KL over all scored tokens."""
        return self._token_mean([step.kl for step in self.steps], range(len(self.texts)))

    @cached_property
    def perplexity_ratio(self) -> Interval:
        """Perplexity of the prose over that with a float16 cache."""
        prose = [i for i, text in enumerate(self.texts) if not text.judged]
        change = self._token_mean([step.candidate_nll - step.baseline_nll for step in self.steps], prose)
        return Interval(math.exp(change.value), math.exp(change.low), math.exp(change.high))

    @cached_property
    def answers(self) -> list[bool]:
        """Whether greedy decoding gives the right answer, per question."""
        pairs = zip(self.texts, self.steps, strict=True)
        return [bool((step.greedy == np.array(text.targets)).all()) for text, step in pairs if text.judged]

    @property
    def accuracy(self) -> float | None:
        """Share of the questions that are answered rightly; None where nothing was asked."""
        return sum(self.answers) / len(self.answers) if self.answers else None

    def _token_mean(self, values: Sequence[npt.NDArray[np.float64]], text_numbers: Sequence[int]) -> Interval:
        sums = np.array([[values[i].sum(), len(values[i])] for i in text_numbers])
        total, drawn = sums.sum(axis=0), resampled_sums(sums, [self.texts[i].document for i in text_numbers])
        return Interval.of(total[0] / total[1], drawn[:, 0] / drawn[:, 1])


def kl_ratio(worse: Measurement, better: Measurement) -> Interval:
    """Return the mean KL of `worse` over that of `better`, paired by document."""
    sums = np.array([[w.kl.sum(), b.kl.sum()] for w, b in zip(worse.steps, better.steps, strict=True)])
    drawn = resampled_sums(sums, [text.document for text in worse.texts])
    total = sums.sum(axis=0)
    return Interval.of(total[0] / total[1], drawn[:, 0] / drawn[:, 1])


def typical_kl_ratio(worse: Measurement, better: Measurement) -> float:
    """Return the KL ratio of the typical document, the geometric mean over documents, which a few tokens cannot dominate."""
    floor = np.full(len(worse.texts), LEAST_KL)
    ratios = np.maximum(worse.document_kl, floor) / np.maximum(better.document_kl, floor)
    return float(np.exp(np.log(ratios).mean()))


class Bench:
    """A model, the texts to score, and the model's log-probabilities with a float16 cache. Measures every policy once.

    Args:
        name: Name of the model and the texts in progress messages; measurements of another name are not taken from the store.
        model: The model.
        texts: Texts to score.
        states: Keys and values that static scales are calibrated from.
        progress: Reports the progress.
        store: Keeps what was measured.
    """

    def __init__(
        self,
        name: str,
        model: LlamaForCausalLM,
        texts: Sequence[Text],
        states: CachedStates,
        progress: Progress,
        store: Store,
    ) -> None:
        self.name, self.model, self.texts, self.states = name, model, texts, states
        self._progress, self._store = progress, store
        self._measurements: dict[str, Measurement] = {}

    def baseline(self, text: Text) -> npt.NDArray[np.float32]:
        """Return the log-probabilities (scored tokens, vocabulary) of a text with a float16 cache."""

        def compute() -> npt.NDArray[np.float32]:
            logits = self._engine(FP16_POLICY).forced(text.tokens, text.first)
            for rows in _blocks(len(logits)):
                logits[rows] = log_softmax(logits[rows])
            return logits

        return self._store.array([self.name, "baseline", text.tokens, text.first], compute).view(np.float32)

    def measure(self, policy: KVPolicy) -> Measurement:
        """Score all texts with a cache under `policy`."""
        key = policy.model_dump_json(exclude={"name"})
        if key not in self._measurements:
            engine = self._engine(policy)
            steps = []
            for i, text in enumerate(self.texts):
                self._progress(f"{self.name}, policy {len(self._measurements) + 1}", i, len(self.texts))
                scored = partial(engine.forced, text.tokens, text.first)
                steps.append(self.compare(text, key, scored))
            self._measurements[key] = Measurement(policy, engine.shape, self.texts, steps)
        return self._measurements[key]

    def compare(self, text: Text, key: object, scored: Callable[[], npt.NDArray[np.float32]]) -> StepStatistics:
        """Return the statistics of a text's logits (scored tokens, vocabulary), which are computed if they are not kept.

        Args:
            text: The text, or its beginning.
            key: What distinguishes these logits from others of the text.
            scored: Computes the logits.
        """

        def compute() -> StepStatistics:
            baseline, logits = self.baseline(text), scored()
            parts = _blocks(len(logits))
            return StepStatistics.joined(
                [compare(baseline[rows], log_softmax(logits[rows]), list(text.targets[rows])) for rows in parts]
            )

        return self._store.statistics([self.name, key, text.tokens, text.first], compute)

    def _engine(self, policy: KVPolicy) -> OracleEngine:
        return OracleEngine.from_model(self.model, policy, kv_scales(policy, self.states))


def _blocks(rows: int) -> list[slice]:
    """Slices of few rows each, because a comparison makes several copies of them in float64."""
    return [slice(first, first + ROWS) for first in range(0, rows, ROWS)]
