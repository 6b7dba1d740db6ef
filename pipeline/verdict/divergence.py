"""The figures of a comparison of two engines' distributions, each mean with its standard error: part of a report.

Units: KL and NLL in nats per token, probabilities as fractions. A float that was not finite is null.
"""

from pipeline.verdict.record import Number, Record


class Estimate(Record):
    """A figure with its standard error, which documents and not tokens decide; null for one document."""

    value: Number
    error: Number


class Percentiles(Record):
    """Percentiles over tokens, by linear interpolation."""

    minimum: Number
    p0_1: Number
    p1: Number
    p5: Number
    p10: Number
    p25: Number
    median: Number
    p75: Number
    p90: Number
    p95: Number
    p99: Number
    p99_9: Number
    maximum: Number


class Divergence(Record):
    """The figures that llama.cpp's `llama-perplexity --kl-divergence` prints, over the same tokens as the fidelity."""

    candidate_ppl: Estimate
    baseline_ppl: Estimate
    nll_correlation: Number
    """Of the tokens' NLL in both engines, Cor(ln(PPL(Q)), ln(PPL(base))) there."""
    log_ppl_ratio: Estimate
    ppl_ratio: Estimate
    ppl_difference: Estimate
    kl: Estimate
    kl_percentiles: Percentiles
    delta_p: Estimate
    """Change of the reference token's probability, as a fraction."""
    delta_p_percentiles: Percentiles
    rms_delta_p: Estimate
    same_top: Estimate
    """Share of tokens for which both engines find the same token most likely."""

    @property
    def lines(self) -> list[str]:
        """The figures that matter most, a line each of perplexities, KL and probabilities."""
        kl = self.kl_percentiles
        tail = (("median", kl.median), ("99 %", kl.p99), ("99.9 %", kl.p99_9), ("maximum", kl.maximum))
        return [
            f"perplexity {_shown(self.candidate_ppl, '.4f')} against {_shown(self.baseline_ppl, '.4f')}, "
            f"ratio {_shown(self.ppl_ratio, '.4f')}",
            f"KL {_shown(self.kl, '.2e')}, " + ", ".join(f"{name} {_number(value, '.2e')}" for name, value in tail),
            f"change of p {_shown(self.delta_p, '+.4f')}, RMS {_shown(self.rms_delta_p, '.4f')}, "
            f"same most likely token {_shown(self.same_top, '.4f')}",
        ]


def _number(value: Number, form: str) -> str:
    return "-" if value is None else format(value, form)


def _shown(estimate: Estimate, form: str) -> str:
    return f"{_number(estimate.value, form)} ± {_number(estimate.error, form.lstrip('+'))}"
