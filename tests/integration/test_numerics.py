"""The study of formats: its central claims on a small sample of the tiny model."""

import pytest
import torch

from benchmarks.benchlib import load_model
from benchmarks.numerics import CLAIMS, EXACT, POLICIES, Measured, measure, policy, tiny_calibration, tiny_texts, verdict

torch.set_num_threads(1)
ORDERED = ("int8 per token", "int8 per tensor", "int4 g32", "int4 per token", "int4 per tensor")
ASKED = (*ORDERED, "int4 keys", "int4 values", "int4 per token, rotated", "int4, 64 recent exact")


@pytest.fixture(scope="module")
def measured() -> dict[str, Measured]:
    policies = {name: POLICIES[name] for name in ASKED} | {"exact": policy(EXACT)}
    texts = tiny_texts({"prose": 3, "retrieval": 2, "copy": 4})
    return measure(load_model(), texts, tiny_calibration(), policies)


def test_formats_order_as_published_from_int8_on(measured: dict[str, Measured]) -> None:
    errors = [measured[name].mean_kl for name in ORDERED]
    assert errors == sorted(errors)
    assert errors[0] < 1e-3
    assert errors[-1] > 1


def test_int4_costs_the_keys_and_a_rotation_or_a_recent_window_saves_them(measured: dict[str, Measured]) -> None:
    both, keys, values, rotated, recent = (
        measured[name].mean_kl
        for name in ("int4 per token", "int4 keys", "int4 values", "int4 per token, rotated", "int4, 64 recent exact")
    )
    assert keys > 20 * values
    assert rotated < both / 10
    assert recent < both


def test_an_unrounded_cache_is_the_baseline(measured: dict[str, Measured]) -> None:
    assert measured["exact"].mean_kl < 1e-12
    assert measured["exact"].perplexity_ratio == pytest.approx(1.0)


def test_a_verdict_says_which_of_two_policies_is_better_and_claims_name_measured_ones(measured: dict[str, Measured]) -> None:
    good, bad, documents = measured["int8 per token"], measured["int4 per tensor"], [str(i) for i in range(9)]
    assert verdict(good, bad, documents).endswith("| HOLDS")
    assert verdict(bad, good, documents).endswith("| DOES NOT HOLD")
    assert verdict(good, good, documents) == "1x [1, 1] | UNDECIDED"
    assert all({better, worse} <= POLICIES.keys() for _, better, worse in CLAIMS)
