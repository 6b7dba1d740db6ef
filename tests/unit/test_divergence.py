"""llama.cpp's figures: against its own formulas where documents are single tokens, and with documents that are alike."""

import math

import numpy as np
import pytest

from stages.evaluate.distances.distance import StepStatistics
from stages.evaluate.distances.divergence import divergence


def steps(count: int) -> StepStatistics:
    rng = np.random.default_rng(0)
    base = rng.exponential(size=count)
    return StepStatistics(
        kl=rng.exponential(0.01, count),
        baseline_nll=base,
        candidate_nll=base + rng.normal(0.01, 0.1, count),
        top1=(rng.random(count) < 0.9).astype(np.float64),
        top10=np.ones(count),
        delta_p=rng.normal(0, 0.05, count),
        greedy=np.zeros(count, np.int64),
    )


def test_independent_tokens_have_the_errors_that_llama_cpp_prints() -> None:
    s = steps(400)
    found = divergence(s, [1] * 400, [str(i) for i in range(400)])
    base, quantized = s.baseline_nll, s.candidate_nll
    unc = {name: values.std() / math.sqrt(399) for name, values in (("q", quantized), ("b", base), ("r", quantized - base))}
    ppl, ppl_base = math.exp(quantized.mean()), math.exp(base.mean())
    covariance = np.cov(quantized, base, ddof=0)[0, 1] / 399
    assert found.candidate_ppl.value == pytest.approx(ppl)
    assert found.candidate_ppl.error == pytest.approx(ppl * unc["q"])
    assert found.baseline_ppl.error == pytest.approx(ppl_base * unc["b"])
    assert found.nll_correlation == pytest.approx(covariance / (unc["q"] * unc["b"]))
    assert found.log_ppl_ratio.error == pytest.approx(unc["r"])
    assert found.ppl_ratio.value == pytest.approx(ppl / ppl_base)
    assert found.ppl_ratio.error == pytest.approx(ppl / ppl_base * unc["r"])
    variance = (ppl * unc["q"]) ** 2 + (ppl_base * unc["b"]) ** 2 - 2 * ppl * ppl_base * covariance
    assert found.ppl_difference.error == pytest.approx(math.sqrt(variance))
    assert found.kl.error == pytest.approx(s.kl.std() / math.sqrt(399))
    rms = math.sqrt((s.delta_p**2).mean())
    assert found.rms_delta_p.value == pytest.approx(rms)
    assert found.rms_delta_p.error == pytest.approx(0.5 / rms * (s.delta_p**2).std() / math.sqrt(399))
    share = s.top1.mean()
    assert found.same_top.error == pytest.approx(math.sqrt(share * (1 - share) / 399))
    assert found.kl_percentiles.p99_9 == pytest.approx(np.percentile(s.kl, 99.9))
    assert found.delta_p_percentiles.minimum == pytest.approx(s.delta_p.min())


def test_tokens_that_are_alike_in_a_document_count_once() -> None:
    s = steps(40)
    repeated = StepStatistics(*(np.repeat(getattr(s, name), 10) for name in StepStatistics.__dataclass_fields__))
    once = divergence(s, [1] * 40, [str(i) for i in range(40)])
    tenfold = divergence(repeated, [10] * 40, [str(i) for i in range(40)])
    assert tenfold.kl.error == pytest.approx(once.kl.error)
    assert tenfold.ppl_difference.error == pytest.approx(once.ppl_difference.error)


def test_one_document_has_no_errors_and_a_nan_is_null() -> None:
    s = steps(10)
    s.kl[3] = math.nan
    found = divergence(s, [10], ["a"])
    assert found.log_ppl_ratio.error is None
    assert found.log_ppl_ratio.value is not None
    assert (found.kl.value, found.kl_percentiles.median) == (None, None)


def test_the_lines_show_the_figures_with_their_errors() -> None:
    first, second, third = divergence(steps(400), [4] * 100, [str(i) for i in range(100)]).lines
    assert first.startswith("perplexity ")
    assert " against " in first
    assert " ± " in second
    assert "same most likely token 0." in third
