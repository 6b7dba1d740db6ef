"""`capacity.json`: what a memory budget holds under every policy. Bytes are of one GPU unless they say otherwise."""

from pipeline.core.kv import KVPolicy
from pipeline.core.strict import StrictModel
from pipeline.planning.use import CapacityConfig


class TokenBytes(StrictModel):
    """Bytes of one token in all layers, outside of windows."""

    keys: int
    values: int
    scales: int
    """Of keys and values, zeros included: a part of both."""

    @property
    def total(self) -> int:
        return self.keys + self.values


class Offload(StrictModel):
    """What the admitted requests keep in host memory."""

    host_bytes: int
    """All of it comes to the GPU in every decode step of all requests."""
    ms_per_step: float
    """At the rate of the link."""


class PolicyCapacity(StrictModel):
    """What a memory budget holds under one policy. Bytes are of one GPU unless they say otherwise."""

    policy: KVPolicy
    name: str
    """The policy's name, and what differs from the one of conf/."""
    token_bytes: TokenBytes
    """Of the whole model, all GPUs together without copied heads."""
    token_bytes_of_a_gpu: int
    exact_bytes: int
    """Of one sequence: sinks and recent tokens in float16."""
    window_bytes: int
    """Of one sequence beyond its window: second copies."""
    tokens_that_fit: int
    """The memory over the bytes of a token: no pages, no cost by sequence, every layer full."""
    tokens_at_ceiling: int
    """The ceiling's share of them, to the nearest token."""
    requests: int
    """Of the mix, in whole sequences and pages, admitted to the ceiling."""
    live_tokens: int
    """Of their contexts."""
    used_bytes: int
    mix_bytes: int
    """Of one mix, without shared pages: among policies that admit alike, fewer are better."""
    requests_by_context: dict[int, int]
    """Length in tokens -> requests that are admitted if all are that long."""
    requests_without: dict[str, int]
    """What a request has or shares -> requests that are admitted without it."""
    smaller_than: dict[str, int | None]
    """Another policy -> tokens from which on a sequence takes fewer bytes than under it; None for never."""
    outweighs_weights_from: int | None
    """Tokens from which on the caches of `capacity.concurrency` requests take more than the weights; None for never."""
    by_heads: dict[str, int]
    """MHA, the model's own, MQA -> bytes of a token in the whole model."""
    by_ranks: dict[int, int]
    """Tensor-parallel degree -> bytes of a token on each GPU."""
    offload: Offload | None


class Budget(StrictModel):
    """Memory of one GPU, in bytes."""

    gpu: int
    weights: int
    reserve: int

    @property
    def cache(self) -> int:
        return self.gpu - self.weights - self.reserve


class Capacity(StrictModel):
    """`capacity.json`."""

    model: str
    layers: int
    q_heads: int
    kv_heads: int
    kv_heads_of_a_gpu: int
    head_dim: int
    use: CapacityConfig
    budget: Budget
    cache_bytes: int
    ceiling_bytes: int
    block_waste: float
    """Share of the pages' tokens that hold none: the rest of each request's last page, over the mix."""
    notes: list[str]
    policies: list[PolicyCapacity]
    unfit: dict[str, str]
    """Policy -> why the model's heads or layers do not take it."""
