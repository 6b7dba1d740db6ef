"""For any policy and mix, the capacity arithmetic equals an allocator that hands out every page of every layer."""

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from stages.planning.capacity import SequenceCost, admit
from stages.policies.formats import Format
from stages.policies.policy import KVPolicy, KVShape, LayerOverride, Window

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
shapes = st.builds(KVShape, layers=st.just(LAYERS), kv_heads=st.integers(1, 3), head_dim=st.sampled_from([16, 32]))


@dataclass
class Allocator:
    """An allocator that hands out single pages and counts the bytes of all pages in use."""

    policy: KVPolicy
    shape: KVShape
    sliding: list[int | None]
    prefix: int
    used: int = 0
    held: set[tuple[object, ...]] = field(default_factory=set)
    sequences: int = 0

    def keeps(self, layer: int, position: int, tokens: int) -> bool:
        window = self.sliding[layer]
        return window is None or position >= tokens - window

    def add(self, tokens: int) -> None:
        """Store a sequence of `tokens` tokens."""
        self.sequences += 1
        shape, policy = self.shape, self.policy
        self.used += (policy.sink_tokens + policy.recent_tokens) * shape.layers * shape.kv_heads * shape.head_dim * 2 * 2
        for layer in range(shape.layers):
            kept = sorted({p // PAGE for p in range(tokens) if self.keeps(layer, p, tokens)})
            shared = {page for page in kept if PAGE * (page + 1) <= self.prefix}
            recent = {p // PAGE for p in range(tokens) if policy.window is not None and p >= tokens - policy.window.tokens}
            for side, form in policy.sides(layer).items():
                size = PAGE * shape.kv_heads * form.token_bytes(shape.head_dim)
                for page in kept:
                    if side.in_window and page not in recent:
                        continue
                    place = (side, layer, page) if page in shared else (side, layer, page, self.sequences)
                    self.used += size * (place not in self.held)
                    self.held.add(place)


@settings(max_examples=120, deadline=None)
@given(
    policy=policies,
    shape=shapes,
    layers=sliding,
    cycle=st.lists(lengths, min_size=1, max_size=5),
    shared=st.integers(0, 399),
    kib=st.integers(0, 3000),
)
def test_requests_are_admitted_as_an_allocator_would_page_by_page(
    policy: KVPolicy, shape: KVShape, layers: list[int | None], cycle: list[int], shared: int, kib: int
) -> None:
    prefix, budget = min(shared, min(cycle) - 1), kib * 1024
    cost = SequenceCost(policy, shape, layers, shared_prefix=prefix)
    allocator = Allocator(policy, shape, layers, prefix)
    expected = 0, 0
    for number in range(10_000):
        tokens = cycle[number % len(cycle)]
        allocator.add(tokens)
        if allocator.used > budget:
            break
        expected = number + 1, expected[1] + tokens
    assert admit(cost, cycle, budget) == expected
