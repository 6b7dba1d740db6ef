"""Capacity of a memory budget under every policy (`capacity.json`). Bytes are per GPU unless stated otherwise.

A sequence holds whole pages, second copies of the pages in the policy's window, and a buffer of exact tokens. The whole pages
of a prefix that all sequences share are stored once, as `fork` shares pages. A policy may evict tokens, and a model's layers
may attend to sliding windows. Some backends free pages layer by layer. Others, such as kvgate's own pool
(`stages.engines.paged`), free a page for all layers together (`BackendConfig.shares_pages`). Such a page stays while any layer
needs it.
"""

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Annotated, Self

from pydantic import Field, model_validator

from stages.checkpoints.intake.shapes import ModelShape
from stages.core.errors import UserError
from stages.core.memory import GIB
from stages.core.strict import StrictModel
from stages.policies.formats import WeightsFormat
from stages.policies.policy import PAGE_TOKENS, KVPolicy, KVShape, page_count, whole_pages

Tokens = Annotated[int, Field(ge=1, le=1 << 24)]
MAX_IN_A_MIX = 1000


class Context(StrictModel):
    """Requests of one length."""

    tokens: Tokens
    """Maximum tokens of a request, prompt and answer."""
    requests: Annotated[int, Field(ge=1, le=MAX_IN_A_MIX)]
    """Number of requests of this length in the mix."""


class CapacityConfig(StrictModel):
    """The intended use, `capacity.*` on the command line."""

    gpu_gib: Annotated[float, Field(gt=0, le=1e6)]
    """Memory of one GPU, in GiB."""
    reserve_gib: Annotated[float, Field(ge=0, le=1e6)]
    """Memory per GPU for activations, graphs, the runtime and static scales, in GiB."""
    weights_gib: Annotated[float, Field(ge=0, le=1e6)] | None
    """Weights of the whole model, in GiB; None counts the weights from config.json."""
    ceiling: Annotated[float, Field(gt=0, le=1)]
    """Share of the cache's memory that admitted requests may fill."""
    contexts: Annotated[list[Context], Field(min_length=1, max_length=64)]
    new_tokens: Tokens
    """Tokens of the longest answer, included in its context's tokens."""
    concurrency: Annotated[int, Field(ge=1, le=1_000_000)]
    """Number of requests that must be served at once."""
    tensor_parallel: Annotated[int, Field(ge=1, le=1024)]
    shared_prefix_tokens: Annotated[int, Field(ge=0, le=1 << 24)]
    """Number of first tokens that all requests have in common."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        shortest, longest = min(c.tokens for c in self.contexts), max(c.tokens for c in self.contexts)
        if sum(context.requests for context in self.contexts) > MAX_IN_A_MIX:
            raise ValueError(f"contexts must be at most {MAX_IN_A_MIX} requests in all: divide them by a common number")
        if self.shared_prefix_tokens >= shortest:
            raise ValueError(
                f"shared_prefix_tokens={self.shared_prefix_tokens} must be less than the shortest of contexts, {shortest}"
            )
        if self.new_tokens > longest:
            raise ValueError(
                f"new_tokens={self.new_tokens} is a part of a context, and the longest has {longest} tokens; lower it"
            )
        return self

    @property
    def longest(self) -> int:
        return max(context.tokens for context in self.contexts)

    @property
    def cycle(self) -> list[int]:
        """Tokens of the mix's requests in order of arrival. Each length is spread as evenly as possible."""
        places = [
            ((2 * number + 1) / (2 * context.requests), context.tokens)
            for context in self.contexts
            for number in range(context.requests)
        ]
        return [tokens for _, tokens in sorted(places)]

    def below_ceiling(self, amount: int) -> int:
        """Return the ceiling's share of `amount` bytes, rounded down. The ceiling is used as the decimal that was written."""
        return int(Fraction(str(self.ceiling)) * amount)


class SequenceCost:
    """Bytes of sequences under one policy, on one GPU."""

    def __init__(self, policy: KVPolicy, shape: KVShape, *, shares_pages: bool, shared_prefix: int = 0) -> None:
        """Group the layers that keep the same pages. `shape` has the KV heads of one GPU.

        `shares_pages`: whether all layers keep equal pages.
        """
        self.policy = policy
        self.shared_pages = shared_prefix // PAGE_TOKENS
        self.exact_bytes = policy.exact_bytes(shape, 1)
        self.page_bytes: dict[KVShape, list[int]] = {}
        """Shape of layers that keep equal pages -> bytes of a page and of its copy in the window, summed over these layers."""
        for layer in range(shape.layers):
            window = shape.window(layer)
            alone = replace(shape, layers=1, windows=() if window is None else (window,))
            sizes = self.page_bytes.setdefault(shape if shares_pages else alone, [0, 0])
            for side, form in policy.sides(layer).items():
                sizes[side.in_window] += PAGE_TOKENS * shape.kv_heads * form.token_bytes(shape.head_dim)

    def own(self, tokens: int) -> int:
        """Return the bytes of a sequence of `tokens` tokens, without shared pages."""
        return self.exact_bytes + self._bytes(tokens, shared=False)

    def shared(self, shortest: int) -> int:
        """Return the bytes of the shared pages that sequences keep. The shortest sequence keeps all pages that others keep."""
        return self._bytes(shortest, shared=True)

    def _bytes(self, tokens: int, *, shared: bool) -> int:
        total, window = 0, page_count(tokens) - self.policy.window_pages(tokens)
        for shape, (size, copy_size) in self.page_bytes.items():
            evicted = self.policy.evicted_pages(tokens, shape)
            # H2O's heavy tokens may lie anywhere. Their pages are counted as if they were first pages.
            count = self.policy.kept_pages(tokens, shape) + len(evicted)
            pages = [page for page in range(count) if page not in evicted and (page < self.shared_pages) is shared]
            total += len(pages) * size + sum(page >= window for page in pages) * copy_size
        return total


def admit(cost: SequenceCost, cycle: Sequence[int], budget: int) -> tuple[int, int]:
    """Admit requests in the order of a mix, repeatedly, until the next request does not fit.

    `cycle` are the tokens of the mix's requests, in order; `budget` is in bytes. Return the number of requests, and the live
    tokens of their contexts. A shared prefix counts for every request.
    """
    bytes_of = {tokens: cost.own(tokens) for tokens in set(cycle)}
    of_cycle, remaining = sum(bytes_of[tokens] for tokens in cycle), budget - cost.shared(min(cycle))
    rounds = max(0, remaining // of_cycle)
    requests, live, remaining = rounds * len(cycle), rounds * sum(cycle), remaining - rounds * of_cycle
    for tokens in cycle:
        remaining -= bytes_of[tokens]
        if remaining < 0:
            break
        requests, live = requests + 1, live + tokens
    return requests, live


class PolicyCapacity(StrictModel):
    policy: KVPolicy
    name: str
    """The policy's name, and its differences from the policy in conf/."""
    bytes_per_token: int
    request_bytes: int
    """Bytes per request in addition to its tokens: exact sinks and recent tokens, and second copies of a full window."""
    tokens_that_fit: int
    """Cache memory divided by bytes per token. Ignores pages and bytes per request, as if every layer kept all tokens."""
    tokens_at_ceiling: int
    """The ceiling's share of `tokens_that_fit`, to the nearest token."""
    requests: int
    """Requests of the mix that are admitted up to the ceiling, in whole sequences and pages."""
    live_tokens: int
    """Tokens in the contexts of the admitted requests."""
    mix_bytes: int
    """Bytes of one mix, without shared pages. Fewer bytes are better if two policies admit the same requests."""


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
    head_dim: int
    use: CapacityConfig
    budget: Budget
    block_waste: float
    """Share of the pages' token slots that stay empty: the rest of every request's last page, over the mix."""
    notes: list[str]
    policies: list[PolicyCapacity]
    unfit: dict[str, str]
    """Policy -> reason why the model's heads or layers do not fit."""


def memory_budget(model: ModelShape, use: CapacityConfig, weights: WeightsFormat) -> Budget:
    """Divide the memory of one GPU.

    Raises UserError if a request is too long for the model, or the weights cannot be counted or leave nothing for the cache.
    """
    limit = model.info.max_positions
    if use.longest > limit:
        raise UserError(
            f"capacity.contexts: got {use.longest:,} tokens, {use.longest - limit:,} too many (the model was made for "
            f"{limit:,} tokens); give shorter ones, such as 'capacity.contexts=[{{tokens: {limit}, requests: 1}}]'"
        )
    if use.gpu_gib <= use.reserve_gib:  # checked first, since counting weights imports torch
        raise UserError(
            f"capacity.gpu_gib={use.gpu_gib:g}: capacity.reserve_gib={use.reserve_gib:g} leaves nothing for weights and cache; "
            "give more memory, or a smaller reserve"
        )
    if use.weights_gib is not None:
        model.kv_heads_per_rank(use.tensor_parallel)  # raises unless the heads divide
        weight_bytes = int(use.weights_gib * GIB / use.tensor_parallel)
    else:
        weight_bytes = model.weight_bytes(weights, use.tensor_parallel)
    budget = Budget(gpu=int(use.gpu_gib * GIB), weights=weight_bytes, reserve=int(use.reserve_gib * GIB))
    if budget.cache <= 0:
        raise UserError(
            f"capacity.gpu_gib={use.gpu_gib:g}: weights of {weight_bytes / GIB:.2f} GiB/GPU and capacity.reserve_gib="
            f"{use.reserve_gib:g} leave nothing for the cache; give more memory, a larger capacity.tensor_parallel, or smaller "
            "weights="
        )
    return budget


def measure_capacity(
    name: str,
    model: ModelShape,
    use: CapacityConfig,
    weights: WeightsFormat,
    policies: Sequence[tuple[str, KVPolicy]],
    *,
    shares_pages: bool,
) -> Capacity:
    """Compute the capacity of every policy. `policies` are display names and policies; `name` is the model's.

    `shares_pages`: whether the backend keeps the same pages for all layers. Raises UserError as `memory_budget` does, or if no
    policy fits the model.
    """
    budget, shape = memory_budget(model, use, weights), model.info.shape
    fitting, unfit = list[PolicyCapacity](), dict[str, str]()
    for label, policy in policies:
        try:
            policy.check_shape(shape)
        except UserError as error:
            unfit[label] = str(error)
        else:
            fitting.append(_policy_capacity(label, policy, model, use, budget, shares_pages))
    if not fitting:
        raise UserError(f"kv={policies[0][0]}: does not fit {model.info.path}: {unfit[policies[0][0]]}")
    slots = sum(whole_pages(context.tokens) * context.requests for context in use.contexts)
    live = sum(context.tokens * context.requests for context in use.contexts)
    notes = []
    if shares_pages and None in shape.windows and any(shape.windows):
        notes.append("all layers keep the same pages on this backend, so the layers with sliding windows free none")
    if use.tensor_parallel > shape.kv_heads:
        copies = use.tensor_parallel // shape.kv_heads
        notes.append(f"{shape.kv_heads} KV heads on {use.tensor_parallel} GPUs: each head's cache is stored {copies} times")
    return Capacity(
        model=name,
        layers=shape.layers,
        q_heads=model.info.q_heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        use=use,
        budget=budget,
        block_waste=1 - live / slots,
        notes=notes,
        policies=fitting,
        unfit=unfit,
    )


def _policy_capacity(
    name: str, policy: KVPolicy, model: ModelShape, use: CapacityConfig, budget: Budget, shares_pages: bool
) -> PolicyCapacity:
    rank = replace(model.info.shape, kv_heads=model.kv_heads_per_rank(use.tensor_parallel))
    cost = SequenceCost(policy, rank, shares_pages=shares_pages, shared_prefix=use.shared_prefix_tokens)
    requests, live_tokens = admit(cost, use.cycle, use.below_ceiling(budget.cache))
    fit = budget.cache // policy.bytes_per_token(rank)
    return PolicyCapacity(
        policy=policy,
        name=name,
        bytes_per_token=policy.bytes_per_token(rank),
        request_bytes=cost.exact_bytes + policy.window_pages(use.longest) * policy.window_page_bytes(rank),
        tokens_that_fit=fit,
        tokens_at_ceiling=round(Fraction(str(use.ceiling)) * fit),
        requests=requests,
        live_tokens=live_tokens,
        mix_bytes=sum(cost.own(context.tokens) * context.requests for context in use.contexts),
    )
