"""Verdicts that more samples cannot decide: a policy that only changes long sequences, and noise that cannot be judged."""

from typing import Any

import pytest
from gate_reports import CLASSES, answered, fidelity, report, verdict
from shipped import SHIPPED

from stages.policies.policy import KVPolicy, KVShape
from stages.verdict.gates import is_final
from stages.verdict.report import SampleRow

SHAPE = KVShape(layers=2, kv_heads=1, head_dim=64)
LONG = {name: policy for name, policy in SHIPPED.items() if policy.takes_effect}


def rows_of(longest: int) -> list[SampleRow]:
    return [row for name, count in CLASSES.items() for row in answered(name, count, context_tokens=longest, scored_tokens=1)]


@pytest.mark.parametrize("policy", LONG.values(), ids=LONG)
def test_a_policy_is_open_until_a_sample_is_long_enough(policy: KVPolicy) -> None:
    needed = max(policy.takes_effect.values())
    assert verdict(rows_of(needed), takes_effect=policy.takes_effect).status == "PASS"
    short = rows_of(needed - 1)
    outcome = verdict(short, takes_effect=policy.takes_effect)
    assert outcome.status == "INCONCLUSIVE"
    (reason,) = outcome.reasons
    assert f"the longest sample has {needed - 1:,} tokens" in reason
    assert f"takes effect from {needed:,} tokens on; ask longer samples, or lower kv." in reason
    assert is_final(outcome, report(short)), "more samples of the same length decide nothing"


@pytest.mark.parametrize("measured", [{"noise": None}, {"noise": fidelity(kl_mean=0.06)}], ids=["not measured", "too large"])
def test_no_more_rounds_run_if_the_noise_cannot_be_judged(measured: dict[str, Any]) -> None:
    rows = rows_of(100)
    outcome = verdict(rows, **measured)
    assert outcome.status == "INCONCLUSIVE"
    assert is_final(outcome, report(rows, planned_rounds=[0.1, 1.0]))


@pytest.mark.parametrize("policy", SHIPPED.values(), ids=SHIPPED)
def test_the_lengths_are_those_at_which_the_cache_changes(policy: KVPolicy) -> None:
    effects = policy.takes_effect
    evicting, aging = effects.get("kv.eviction.window_tokens"), effects.get("kv.window.tokens")
    assert (evicting is None, aging is None) == (policy.eviction is None, policy.window is None)
    if evicting is not None:
        assert [policy.kept_tokens(n, SHAPE) < n for n in (evicting - 1, evicting)] == [False, True]
    if aging is not None and policy.window is not None:
        assert [policy.window.first_page(n) for n in (aging - 1, aging)] == [0, 1]


def test_heavy_hitters_lose_single_tokens() -> None:
    plain = SHIPPED["fp16"].model_dump()
    policy = KVPolicy.model_validate(plain | {"eviction": {"window_tokens": 64, "heavy_tokens": 128}})
    assert policy.takes_effect == {"kv.eviction.window_tokens": 193}
