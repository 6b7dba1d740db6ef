"""Policies with different formats per layer and side: construction and choice; the texts that they are measured on."""

from itertools import product
from pathlib import Path

import numpy as np
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config.policies import load_policies, policy_yaml
from stages.evaluate.inputs.tokens import BundleTokenizer, encode
from stages.planning.tune_measure import split_texts
from stages.planning.tune_records import MAX_LENGTH, MeasuredPolicy, TuneConfig, choose, mixed_policy, mixed_scales
from stages.planning.tune_search import fewest_bytes
from stages.policies.policy import FP16_POLICY, SIDES, KVPolicy, KVShape, LayerOverride, Side
from stages.policies.scales import KVScales, SideScales
from stages.workloads.generated import generate

SHAPE = KVShape(layers=3, kv_heads=2, head_dim=64)
FP8, INT8, INT4 = load_policies("tune.policies", ["fp8", "int8", "int4_g32"])


def test_an_answers_scored_tokens_are_those_of_an_evaluation(tiny_checkpoint: Path) -> None:
    config = TuneConfig(policies=["fp8", "int8"], max_kl=0.1, workloads=["copy"], texts=8)
    texts = [text for part in split_texts(tiny_checkpoint, config, None, 0).values() for text in part]
    samples = encode(generate("copy", 8, 1, split="calibration"), BundleTokenizer(tiny_checkpoint), MAX_LENGTH)
    assert [(len(text.tokens) - text.first, text.first) for text in texts] == [
        (len(item.reference), len(item.prompt) - 1) for item in samples
    ]


@given(
    st.lists(
        st.lists(st.tuples(st.integers(1, 6), st.floats(1e-7, 1)), min_size=1, max_size=3).map(
            lambda options: [*options, *[(1, float("nan"))] * (4 - len(options))]
        ),
        min_size=1,
        max_size=5,
    ),
    st.floats(1e-6, 2),
)
@settings(max_examples=60, deadline=None)
def test_the_choice_has_fewest_bytes_and_then_the_least_kl(places: list[list[tuple[int, float]]], budget: float) -> None:
    sizes, distances = np.moveaxis(np.array(places, float), -1, 0)

    def cost(choice: tuple[int, ...]) -> tuple[float, float]:
        taken = range(len(choice)), choice
        return sizes[taken].sum(), distances[taken].sum()

    allowed = [np.flatnonzero(np.isfinite(row)).tolist() for row in distances]
    every = [cost(choice) for choice in product(*allowed)]
    chosen = fewest_bytes(sizes, distances, budget)
    if chosen is None:
        assert not [kl for _, kl in every if kl <= budget * (1 - 1e-6)]
        return
    assert all(number in numbers for number, numbers in zip(chosen, allowed, strict=True)), "unknown costs are never chosen"
    size, kl = cost(chosen)
    assert kl <= budget * (1 + 1e-6)
    bounds = (1 + 1e-6, 1 - 1e-6)  # the solver rounds
    fewest, most = (min(((s, k) for s, k in every if k <= budget * bound), default=(size, kl)) for bound in bounds)
    assert fewest[0] <= size <= most[0]
    assert size > fewest[0] or kl <= fewest[1] + budget * 1e-5


def test_a_mixed_policy_gives_every_place_its_format() -> None:
    formats = {
        (layer, side): [FP16_POLICY, FP8, INT4][(layer + side.is_key) % 3].sides(layer)[side]
        for layer in range(3)
        for side in SIDES
    }
    policy = mixed_policy("mixed", formats, 3)
    assert KVPolicy.model_validate(yaml.safe_load(policy_yaml(policy, "Found"))) == policy, "it is written and read as itself"
    assert {(layer, side): form for layer in range(3) for side, form in policy.sides(layer).items()} == formats


def test_each_place_has_the_scales_of_its_formats_policy() -> None:
    def scales(value: float) -> KVScales:
        return KVScales(layers=tuple(dict.fromkeys(SIDES, SideScales(scale=(value + n,))) for n in range(3)))

    e5m2 = load_policies("tune.policies", ["fp8_e5m2"])[0]
    policy = KVPolicy(
        name="mixed", key=FP8.key, value=INT8.value, overrides=(LayerOverride(layers=(2,), key=e5m2.key, value=FP8.value),)
    )
    mixed = mixed_scales(policy, SHAPE, [(FP8, scales(1.0)), (INT8, KVScales(layers=({}, {}, {}))), (e5m2, scales(10.0))])
    mixed.check(policy, SHAPE, "scales")
    assert [entry.get(Side.KEY) for entry in mixed.layers] == [SideScales(scale=(v,)) for v in (1.0, 2.0, 12.0)]
    assert mixed.layers[2][Side.VALUE] == SideScales(scale=(3.0,))


def test_the_choice_has_the_fewest_bytes_within_the_budget() -> None:
    large, exact, sound, broken = (
        MeasuredPolicy(policy=policy, origin="uniform", bytes_per_token=size, kl=kl)
        for policy, size, kl in ((INT4, 4, 0.2), (FP16_POLICY, 16, 0.0), (INT8, 8, 0.05), (FP8, 2, None))
    )
    assert choose([large, sound, exact, broken], 0.1, 16) is sound
    assert choose([large, exact, broken], 0.1, 16) is None
