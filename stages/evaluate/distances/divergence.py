"""The figures of llama.cpp's `llama-perplexity --kl-divergence` over scored tokens, each mean with its standard error.

llama.cpp (tools/perplexity/perplexity.cpp) takes its tokens for independent. Here the errors are by document: those of the
tokens of a document add up before they are squared.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipeline.verdict.divergence import Divergence, Estimate, Percentiles
from pipeline.verdict.record import finite
from stages.evaluate.distances.distance import Array, StepStatistics

PERCENTILES = (0, 0.1, 1, 5, 10, 25, 50, 75, 90, 95, 99, 99.9, 100)
"""Those of `Percentiles`, in the order of its fields."""


@dataclass(frozen=True)
class _Clusters:
    """The document of every token, shape (tokens,), numbered from 0."""

    documents: npt.NDArray[np.int64]

    def error(self, values: Array) -> float:
        """The standard error of the mean over tokens; NaN for one document."""
        count = int(self.documents.max()) + 1
        sums = np.bincount(self.documents, weights=values - values.mean(), minlength=count)
        return math.sqrt(count / (count - 1) * float((sums**2).sum())) / len(values) if count > 1 else math.nan

    def mean(self, values: Array) -> Estimate:
        return _estimate(float(values.mean()), self.error(values))


def _estimate(value: float, error: float) -> Estimate:
    return Estimate(value=finite(value), error=finite(error))


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf


def _percentiles(values: Array) -> Percentiles:
    found = np.percentile(values, PERCENTILES).tolist()
    return Percentiles(**{name: finite(value) for name, value in zip(Percentiles.model_fields, found, strict=True)})


def divergence(steps: StepStatistics, tokens: Sequence[int], documents: Sequence[str]) -> Divergence:
    """Return the figures of some samples.

    Args:
        steps: The statistics of their tokens, one sample after the other.
        tokens: Tokens of each sample.
        documents: The document of each sample.
    """
    _, index = np.unique(np.asarray(documents), return_inverse=True)
    clusters = _Clusters(np.repeat(index, tokens))
    base, quantized = steps.baseline_nll, steps.candidate_nll
    base_ppl, quantized_ppl = _exp(float(base.mean())), _exp(float(quantized.mean()))
    ratio = _exp(float((quantized - base).mean()))
    with np.errstate(invalid="ignore", divide="ignore"):
        correlation = float(np.corrcoef(base, quantized)[0, 1]) if len(base) > 1 else math.nan
        difference_error = clusters.error(quantized_ppl * quantized - base_ppl * base)
    squares = steps.delta_p**2
    rms = math.sqrt(float(squares.mean()))
    return Divergence(
        candidate_ppl=_estimate(quantized_ppl, quantized_ppl * clusters.error(quantized)),
        baseline_ppl=_estimate(base_ppl, base_ppl * clusters.error(base)),
        nll_correlation=finite(correlation),
        log_ppl_ratio=clusters.mean(quantized - base),
        ppl_ratio=_estimate(ratio, ratio * clusters.error(quantized - base)),
        ppl_difference=_estimate(quantized_ppl - base_ppl, difference_error),
        kl=clusters.mean(steps.kl),
        kl_percentiles=_percentiles(steps.kl),
        delta_p=clusters.mean(steps.delta_p),
        delta_p_percentiles=_percentiles(steps.delta_p),
        rms_delta_p=_estimate(rms, clusters.error(squares) / (2 * rms) if rms > 0 else 0.0),
        same_top=clusters.mean(steps.top1),
    )
