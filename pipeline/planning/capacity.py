"""What a memory budget holds under every policy, `capacity.json`. Bytes are of one GPU unless they say otherwise."""

from collections.abc import Sequence
from fractions import Fraction

from pipeline.core.errors import UserError
from pipeline.core.formats import WeightsFormat
from pipeline.core.kv import PAGE_TOKENS, KVPolicy, KVShape
from pipeline.core.strict import StrictModel
from pipeline.planning.sequences import SequenceCost, admit, page_count
from pipeline.planning.shapes import ModelShape
from pipeline.planning.use import GIB, CapacityConfig


class PolicyCapacity(StrictModel):
    """What a memory budget holds under one policy."""

    policy: KVPolicy
    name: str
    """The policy's name, and what differs from the one of conf/."""
    bytes_per_token: int
    model_bytes_per_token: int
    """Of the whole model, all GPUs together without copied heads."""
    request_bytes: int
    """Of one request beside its tokens: exact sinks and recent tokens, and second copies of a full window."""
    tokens_that_fit: int
    """The memory over the bytes of a token: no pages, no cost by request, every layer full."""
    tokens_at_ceiling: int
    """The ceiling's share of them, to the nearest token."""
    requests: int
    """Of the mix, in whole sequences and pages, admitted to the ceiling."""
    live_tokens: int
    """Of their contexts."""
    used_bytes: int
    mix_bytes: int
    """Of one mix, without shared pages: among policies that admit alike, fewer are better."""


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
    cache_bytes: int
    ceiling_bytes: int
    block_waste: float
    """Share of the pages' tokens that hold none: the rest of each request's last page, over the mix."""
    notes: list[str]
    policies: list[PolicyCapacity]
    unfit: dict[str, str]
    """Policy -> why the model's heads or layers do not take it."""


def memory_budget(model: ModelShape, use: CapacityConfig, weights: WeightsFormat) -> Budget:
    """Divide the memory of one GPU.

    Raises:
        UserError: when the weights cannot be counted, or leave nothing for the cache.
    """
    if use.weights_gib is not None:
        model.kv_heads_of_a_rank(use.tensor_parallel)  # checks that they divide
        weight_bytes = int(use.weights_gib * GIB / use.tensor_parallel)
    else:
        weight_bytes = model.weight_bytes(weights, use.tensor_parallel)
    budget = Budget(gpu=int(use.gpu_gib * GIB), weights=weight_bytes, reserve=int(use.reserve_gib * GIB))
    if budget.cache <= 0:
        raise UserError(
            f"capacity.gpu_gib={use.gpu_gib:g}: weights of {weight_bytes / GIB:.2f} GiB a GPU and capacity.reserve_gib="
            f"{use.reserve_gib:g} leave nothing for the cache; give more memory, a larger capacity.tensor_parallel, or smaller "
            "weights="
        )
    return budget


def measure(
    name: str, model: ModelShape, use: CapacityConfig, weights: WeightsFormat, policies: Sequence[tuple[str, KVPolicy]]
) -> Capacity:
    """Compute the capacity of every policy.

    Args:
        name: The model's short name.
        model: Its shapes.
        use: What is planned for.
        weights: The format of its weights.
        policies: Their display names and themselves.

    Raises:
        UserError: when the weights cannot be counted or leave nothing for the cache, or no policy fits the model.
    """
    budget = memory_budget(model, use, weights)
    fitting, unfit = list[PolicyCapacity](), dict[str, str]()
    for label, policy in policies:
        try:
            if model.latent is not None and not _fits_latent(policy, model.kv.head_dim):
                raise UserError(f"its latent vectors of {model.latent} numbers (MLA) take one format, without scales a token")
            policy.check_shape(model.kv)
        except UserError as error:
            unfit[label] = str(error)
        else:
            fitting.append(_policy_capacity(label, policy, model, use, budget))
    if not fitting:
        raise UserError(f"kv={policies[0][0]}: does not fit {model.path}: {unfit[policies[0][0]]}")
    slots = sum(page_count(context.tokens) * PAGE_TOKENS * context.requests for context in use.contexts)
    held = sum(context.tokens * context.requests for context in use.contexts)
    notes = list(model.notes)
    if model.latent is not None:
        notes.append(f"a token has one latent vector of {model.latent} numbers for all heads (MLA): half of them count as keys")
    if model.max_positions is not None and use.longest > model.max_positions:
        notes.append(f"contexts reach {use.longest:,} tokens, the model's max_position_embeddings is {model.max_positions:,}")
    if use.tensor_parallel > model.kv.kv_heads and model.latent is None:
        copies = use.tensor_parallel // model.kv.kv_heads
        notes.append(f"{model.kv.kv_heads} KV heads on {use.tensor_parallel} GPUs: each head's cache is stored {copies} times")
    return Capacity(
        model=name,
        layers=model.kv.layers,
        q_heads=model.q_heads,
        kv_heads=model.kv.kv_heads,
        head_dim=model.kv.head_dim,
        use=use,
        budget=budget,
        cache_bytes=budget.cache,
        ceiling_bytes=use.below_ceiling(budget.cache),
        block_waste=1 - held / slots,
        notes=notes,
        policies=fitting,
        unfit=unfit,
    )


def _fits_latent(policy: KVPolicy, head_dim: int) -> bool:
    """Whether a policy says what a vector takes that is keys and values at once: one format, and no scales a token."""
    one = policy.key == policy.value and not policy.overrides and policy.window is None
    return one and not policy.exact_tokens and not policy.key.scales_per_token(head_dim)


def _policy_capacity(name: str, policy: KVPolicy, model: ModelShape, use: CapacityConfig, budget: Budget) -> PolicyCapacity:
    rank = KVShape(model.kv.layers, model.kv_heads_of_a_rank(use.tensor_parallel), model.kv.head_dim)
    cost = SequenceCost(policy, rank, model.windows, shared_prefix=use.shared_prefix_tokens)
    admitted = admit(cost, use.cycle, use.below_ceiling(budget.cache))
    fit = budget.cache // policy.bytes_per_token(rank)
    return PolicyCapacity(
        policy=policy,
        name=name,
        bytes_per_token=policy.bytes_per_token(rank),
        model_bytes_per_token=policy.bytes_per_token(model.kv),
        request_bytes=cost.exact_bytes + policy.window_pages(use.longest) * policy.window_page_bytes(rank),
        tokens_that_fit=fit,
        tokens_at_ceiling=round(Fraction(str(use.ceiling)) * fit),
        requests=admitted.requests,
        live_tokens=admitted.live_tokens,
        used_bytes=admitted.used_bytes,
        mix_bytes=sum(cost.own(context.tokens) * context.requests for context in use.contexts),
    )
