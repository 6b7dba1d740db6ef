"""Scales that differ between a checkpoint and its engine: the kinds of changes, and the gate's decision."""

import pytest
from helpers.verdicts.reports import gates, lines, report

from stages.engines.backend import ROUNDING
from stages.evaluate.conformance.comparer import MIN_MEASURED, ReferenceEngine
from stages.policies.delivery import LayerDelivery, ScaleChangeKind, describe_changes, scale_changes
from stages.policies.policy import Side
from stages.verdict.conformance import ComparedRequest, Distance, EngineConformance, allowed_in_layer

Scales = dict[Side, tuple[float, ...]]
BOTH = {0: [Side.KEY, Side.VALUE]}
CARRIED: Scales = {Side.KEY: (0.25,), Side.VALUE: (0.5,)}


def layer(carried: Scales, key: tuple[float, ...], value: tuple[float, ...]) -> list[LayerDelivery]:
    return [LayerDelivery(carried, {Side.KEY: key, Side.VALUE: value})]


@pytest.mark.parametrize(
    ("carried", "key", "value", "kinds"),
    [
        (CARRIED, (0.25,), (0.5,), []),
        ({Side.KEY: (0.2503,), Side.VALUE: (0.5,)}, (0.25,), (0.5,), []),  # rounded to bfloat16
        (CARRIED, (0.251,), (0.5,), ["changed"]),
        ({Side.VALUE: (0.5,)}, (1.0,), (0.5,), ["missing"]),
        (CARRIED, (1.0,), (1.0,), ["defaulted", "defaulted"]),
        (CARRIED, (0.5,), (0.5,), ["merged"]),
        ({Side.KEY: (0.25, 0.75), Side.VALUE: (0.5, 0.5)}, (0.75,), (0.5,), ["merged", "merged"]),
        (CARRIED, (0.5,), (0.25,), ["swapped", "swapped"]),
        (CARRIED, (0.3,), (0.5,), ["changed"]),
    ],
)
def test_scale_changes_are_classified(
    carried: Scales, key: tuple[float, ...], value: tuple[float, ...], kinds: list[ScaleChangeKind]
) -> None:
    delivered = layer(carried, key, value)
    assert [change.kind for change in scale_changes(delivered, BOTH)] == kinds
    assert scale_changes(delivered, {0: []}) == [], "sides without static scales are ignored"


MERGED = scale_changes(layer(CARRIED, (0.5,), (0.5,)), BOTH)


@pytest.mark.parametrize(
    ("changes", "allowed", "status", "reason"),
    [
        ([], [], "PASS", "candidate: scales: the engine uses the scales that its checkpoint carries"),
        (MERGED, ["defaulted"], "FAIL",
         "candidate: scales: 1 merged (layer 0 keys: 0.25 was merged with others to the largest, 0.5)"),
        (MERGED, ["merged"], "WARNING", f"candidate: scales: {describe_changes(MERGED)}, as gates.allow_scale_changes accepts"),
    ],
)  # fmt: skip
def test_scale_changes_fail_or_warn_if_allowed(changes: list[object], allowed: list[str], status: str, reason: str) -> None:
    (line,) = lines("scale_delivery", report([], scale_changes=changes), thresholds=gates(allow_scale_changes=allowed))
    assert (line.status, line.reason) == (status, reason)


def distance(kl: float, layers: tuple[float, ...] = ()) -> Distance:
    return Distance(kl_mean=kl, kl_max=kl, stored_error=0.0, stored_by_layer=layers)


def request(engine: Distance, rounding: Distance) -> ComparedRequest:
    return ComparedRequest(sample="a", prompt_tokens=4, decoded_tokens=2, engine=engine, rounding=rounding)


def test_the_rounding_is_measured_on_the_baseline() -> None:
    """The baseline's KL is 1/16 of the assumed KL, so its rounding is 1/4."""
    compared = [request(distance(1e-5), distance(1.6e-4)), request(distance(1e-6), distance(1.6e-4))]
    baseline = EngineConformance(policy="fp16", requests=compared)
    reference = ReferenceEngine(None, ROUNDING["bfloat16"], measures_rounding=True)  # type: ignore[arg-type]
    assert reference.rounding == ROUNDING["bfloat16"]
    assert reference.with_limits_of(baseline).rounding == pytest.approx(ROUNDING["bfloat16"] / 4, rel=1e-3)
    exact = EngineConformance(policy="fp16", requests=[request(distance(0.0), distance(1.6e-4))])
    assert reference.with_limits_of(exact).rounding == ROUNDING["bfloat16"] * MIN_MEASURED
    assumed = ReferenceEngine(None, ROUNDING["bfloat16"])  # type: ignore[arg-type]
    assert assumed.with_limits_of(baseline).rounding == assumed.rounding


def test_a_layer_with_twice_the_16_bit_storage_error_deviates() -> None:
    rounding = distance(1e-4, (0.004, 0.010))
    sound, truncating = (request(distance(1e-4, layers), rounding) for layers in ((0.001, 0.003), (0.0255, 0.0255)))
    assert sound.times_allowed(4.0) < 1
    assert truncating.times_allowed(4.0) == pytest.approx(0.0255 / allowed_in_layer(0.004))
    assert truncating.times_allowed(4.0) > 3
