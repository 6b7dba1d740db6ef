"""The arithmetic of capacities is that of an allocator which hands out every page of every layer, for any policy and mix."""

from dataclasses import dataclass, field
from fractions import Fraction

from hypothesis import example, given, settings
from hypothesis import strategies as st

from pipeline.core.formats import Format
from pipeline.core.kv import FP16_POLICY, KVPolicy, KVShape, LayerOverride, Window
from pipeline.planning.sequences import Admitted, SequenceCost, admit, holds_from
from pipeline.planning.use import Eviction

PAGE = 64
LAYERS = 3
FORMATS = (
    Format(dtype="fp16"),
    Format(dtype="fp8_e4m3", granularity="per_tensor", scale="uncalibrated"),
    Format(dtype="int8", granularity="per_token", scale="dynamic", symmetric=False),
    Format(dtype="int4", granularity="per_group", group_size=16, scale="dynamic"),
)

formats = st.sampled_from(FORMATS)
near_borders = st.builds(lambda page, offset: PAGE * page + offset, st.integers(1, 5), st.integers(-2, 2))
lengths = st.integers(1, 400) | near_borders
windows = st.builds(Window, tokens=st.sampled_from([64, 128, 192]), key=formats, value=st.none() | formats)
policies = st.builds(
    KVPolicy,
    name=st.just("any"),
    key=formats,
    value=formats,
    sink_tokens=st.integers(0, 8),
    recent_tokens=st.integers(0, 70),
    window=st.none() | windows,
    overrides=st.just(()) | st.builds(lambda form: (LayerOverride(layers=(1,), key=form),), formats),
)
sliding = st.lists(st.none() | lengths, min_size=LAYERS, max_size=LAYERS)
evictions = st.none() | st.builds(Eviction, first=st.integers(0, 130), latest=lengths)
shapes = st.builds(KVShape, layers=st.just(LAYERS), kv_heads=st.integers(1, 3), head_dim=st.sampled_from([16, 32]))


@dataclass
class Allocator:
    """Hands out pages one by one, and counts the bytes of those that some sequence holds."""

    policy: KVPolicy
    shape: KVShape
    sliding: list[int | None]
    eviction: Eviction | None
    prefix: int
    offload: float
    gpu: int = 0
    host: int = 0
    held: set[tuple[object, ...]] = field(default_factory=set)
    sequences: int = 0

    def keeps(self, layer: int, position: int, tokens: int) -> bool:
        window = self.sliding[layer]
        if window is not None:
            return position >= tokens - window
        if self.eviction is not None:
            return position < self.eviction.first or position >= tokens - self.eviction.latest
        return True

    def add(self, tokens: int) -> None:
        """Store a sequence of so many tokens."""
        self.sequences += 1
        shape, policy = self.shape, self.policy
        self.gpu += (policy.sink_tokens + policy.recent_tokens) * shape.layers * shape.kv_heads * shape.head_dim * 2 * 2
        for layer in range(shape.layers):
            kept = sorted({p // PAGE for p in range(tokens) if self.keeps(layer, p, tokens)})
            shared = {page for page in kept if PAGE * (page + 1) <= self.prefix}
            own = [page for page in kept if page not in shared]
            away = set(own[: int(Fraction(str(self.offload)) * len(own))])
            recent = {p // PAGE for p in range(tokens) if policy.window is not None and p >= tokens - policy.window.tokens}
            for side, form in policy.sides(layer).items():
                size = PAGE * shape.kv_heads * form.token_bytes(shape.head_dim)
                for page in kept:
                    if side.in_window and page not in recent:
                        continue
                    place = (side, layer, page) if page in shared else (side, layer, page, self.sequences)
                    if place in self.held:
                        continue
                    self.held.add(place)
                    if page in away and not side.in_window:
                        self.host += size
                    else:
                        self.gpu += size


@settings(max_examples=120, deadline=None)
@given(
    policy=policies,
    shape=shapes,
    layers=sliding,
    eviction=evictions,
    cycle=st.lists(lengths, min_size=1, max_size=5),
    shared=st.integers(0, 399),
    offload=st.sampled_from([0.0, 0.1, 0.5, 0.99]),
    kib=st.integers(0, 3000),
)
def test_requests_are_admitted_as_an_allocator_would_page_by_page(
    policy: KVPolicy,
    shape: KVShape,
    layers: list[int | None],
    eviction: Eviction | None,
    cycle: list[int],
    shared: int,
    offload: float,
    kib: int,
) -> None:
    prefix, budget = min(shared, min(cycle) - 1), kib * 1024
    cost = SequenceCost(policy, shape, layers, shared_prefix=prefix, eviction=eviction, offload_share=offload)
    allocator = Allocator(policy, shape, layers, eviction, prefix, offload)
    expected, live = Admitted(0, 0, 0, 0), 0
    for number in range(10_000):
        tokens = cycle[number % len(cycle)]
        allocator.add(tokens)
        if allocator.gpu > budget:
            break
        live += tokens
        expected = Admitted(number + 1, live, allocator.gpu, allocator.host)
    assert admit(cost, cycle, budget) == expected


@settings(max_examples=60, deadline=None)
@example(
    KVPolicy(name="bytes", key=FORMATS[2], value=FORMATS[2]),
    KVPolicy(name="recent", key=FORMATS[1], value=FORMATS[2], recent_tokens=31),
    KVShape(layers=3, kv_heads=1, head_dim=32),
    [None, 1, 1],
    None,
)
@given(policy=policies, other=policies | st.just(FP16_POLICY), shape=shapes, layers=sliding, eviction=evictions)
def test_a_break_even_length_is_the_one_that_trying_every_length_finds(
    policy: KVPolicy, other: KVPolicy, shape: KVShape, layers: list[int | None], eviction: Eviction | None
) -> None:
    ours, theirs = (SequenceCost(one, shape, layers, eviction=eviction) for one in (policy, other))

    def gain(tokens: int) -> int:
        return theirs.alone(tokens) - ours.alone(tokens)

    settled = max(ours.settled_pages, theirs.settled_pages)
    found = holds_from(gain, ours.borders | theirs.borders, settled, theirs.growth - ours.growth)
    limit = max(4 * (found or 0), 64 * (settled + 40))
    while found is None and all(gain(tokens) > 0 for tokens in range(limit - 2 * PAGE, limit)):
        limit *= 2  # exact tokens of the other are made up for by its smaller pages, later
        assert limit < 1 << 20, "it is never lost, and should have been found"
    without = [tokens for tokens in range(1, limit) if gain(tokens) <= 0]
    if found is None:
        assert without
        assert without[-1] >= limit - 2 * PAGE
    else:
        assert found == (without[-1] if without else 0) + 1
