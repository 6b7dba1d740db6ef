"""The thresholds of all gates. The gates are in `stages.verdict.gates`."""

from typing import Annotated, Self

from pydantic import Field

from stages.core.strict import StrictModel
from stages.policies.delivery import ScaleChangeKind

MAX_SAMPLES = 1_000_000
"""Maximum number of samples that an INCONCLUSIVE suggests."""

MAX_ATTEMPTS = 20

ALPHA = 0.05
"""Error probability: of a wrong PASS of one gate over all looks and attempts, and of a wrong FAIL over all looks and gates."""

RESERVED = 0.1
"""Share of ALPHA that is reserved for evaluations after an INCONCLUSIVE."""

MARGIN = 0.05
"""Maximum fraction of greedy answers that a candidate may lose. It is not configurable: greedy answers flip by chance, and
recovery has its own thresholds."""

MIN_TOP10_OVERLAP = 0.8
"""Minimum mean share of the baseline's ten most likely tokens that are among the candidate's ten. SmolLM2 has 0.95 at FP8; the
must-fail control must be below."""

FAR_KL = 1.0
"""KL in nats that at most one token in a thousand may exceed. For INT4 in groups of 32 on SmolLM2, this KL is 2.9."""

Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
Margin = Annotated[float, Field(gt=0, lt=1)]


class Thresholds(StrictModel):
    """The thresholds of the gates, `gates.*` on the command line. They are compared with raw values; only messages are rounded.

    The thresholds of distances are at least four times the distances of sound caches of a real model. Over running text, the
    mean KL of SmolLM2 is 0.008 at FP8 and 0.011 with INT4 values. INT4 keys and values in groups of 32, which lose answers,
    have 0.13 (docs/numerics.md).
    """

    attempt: Annotated[int, Field(ge=1, le=MAX_ATTEMPTS)] = 1
    """Number of this evaluation of a candidate. After an INCONCLUSIVE use the next number, which makes a PASS harder."""
    min_samples: Annotated[int, Field(ge=1)] = 15
    """Minimum documents for a PASS, per workload; for a report without answers, over all workloads."""
    min_recovery: Margin = 0.95
    """Minimum share of the probability of right answers that is kept, over all questions. The limit is that of llm-compressor's
    lm-eval tests, whose recovery is a ratio of benchmark scores."""
    min_workload_recovery: Margin = 0.8
    """Minimum share per workload. 15 documents can show this share without passing broken caches."""
    min_baseline_probability: Share = 0.02
    """Minimum mean probability of right answers under the baseline. A workload below it cannot PASS, since it has little to
    lose."""
    max_acceptance_loss: Margin = 0.1
    """Maximum share of the baseline's acceptance length under speculative decoding that a candidate may lose, per workload and
    drafter, if `workloads.speculation` measures it."""
    max_mean_kl: Positive = 0.05
    """Maximum mean KL(baseline || candidate) per workload, nats per token; a document counts at most three times this."""
    max_ruined_share: Margin = 0.025
    """Maximum share of ruined requests. The mean KL of a ruined request is above three times `max_mean_kl`. 60 requests
    suffice for a PASS if none is ruined. This shows only that the share is below 7 % (60 documents) or below 30 % (15
    documents)."""
    allow_scale_changes: Annotated[tuple[ScaleChangeKind, ...], Field(strict=False)] = ()
    """Accepted changes that another library makes to the scales of a checkpoint. Other changes are refused before judging."""

    @property
    def pass_alpha(self) -> float:
        """Maximum probability of a wrong PASS over all looks of this attempt; over all attempts it is at most ALPHA.

        The first attempt has 9/10 of ALPHA, and every later one half of the remainder.
        """
        return ALPHA * ((1 - RESERVED) if self.attempt == 1 else RESERVED / 2 ** (self.attempt - 1))

    @property
    def next_attempt(self) -> Self | None:
        """These thresholds, for the next attempt; None after the last attempt."""
        return self.model_copy(update={"attempt": self.attempt + 1}) if self.attempt < MAX_ATTEMPTS else None
