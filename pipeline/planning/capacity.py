"""The capacity of every policy for one model and one use: bytes, live tokens, requests, break-even lengths."""

from collections.abc import Mapping, Sequence
from fractions import Fraction

from pipeline.core.errors import UserError
from pipeline.core.formats import WeightsFormat
from pipeline.core.kv import FP16_POLICY, PAGE_TOKENS, KVPolicy, KVShape
from pipeline.planning.records import Budget, Capacity, Offload, PolicyCapacity, TokenBytes
from pipeline.planning.sequences import SequenceCost, admit, holds_from, page_count
from pipeline.planning.shapes import ModelShape
from pipeline.planning.use import GIB, CapacityConfig

RANKS = (1, 2, 4, 8)
"""Tensor-parallel degrees that the shares are listed for, where they divide the heads."""

SHORTEST, LONGEST = 1024, 131_072
"""Lengths that requests are counted for, in tokens; up to the longest context where that is longer."""


def memory_budget(model: ModelShape, use: CapacityConfig, weights: WeightsFormat) -> Budget:
    """Divide the memory of one GPU.

    Raises:
        UserError: when the weights cannot be counted, or leave nothing for the cache.
    """
    model.kv_heads_of_a_rank(use.tensor_parallel)
    if use.weights_gib is not None:
        weight_bytes = int(use.weights_gib * GIB / use.tensor_parallel)
    else:
        counted = model.weight_bytes(weights, use.tensor_parallel)
        if counted is None:
            raise UserError(
                "capacity.weights_gib=null: the weights are counted for Llama, Mistral, Qwen2 and Qwen3 that are not quantized "
                f"already, and {model.path} is none; give the GiB of its weights"
            )
        weight_bytes = counted
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
    unfit = {}
    fitting = []
    for label, policy in policies:
        try:
            policy.check_shape(model.kv)
            fitting.append((label, policy))
        except UserError as error:
            unfit[label] = str(error)
    if not fitting:
        raise UserError(f"kv={policies[0][0]}: does not fit {model.path}: {unfit[policies[0][0]]}")
    slots = sum(page_count(context.tokens) * PAGE_TOKENS * context.requests for context in use.contexts)
    held = sum(context.tokens * context.requests for context in use.contexts)
    notes = list(model.notes)
    if model.max_positions is not None and use.longest > model.max_positions:
        notes.append(f"contexts reach {use.longest:,} tokens, the model's max_position_embeddings is {model.max_positions:,}")
    if use.tensor_parallel > model.kv.kv_heads:
        copies = use.tensor_parallel // model.kv.kv_heads
        notes.append(f"{model.kv.kv_heads} KV heads on {use.tensor_parallel} GPUs: each head's cache is stored {copies} times")
    rank = KVShape(model.kv.layers, model.kv_heads_of_a_rank(use.tensor_parallel), model.kv.head_dim)
    # A sequence that shares nothing and lies on the GPU: what break-even lengths compare.
    alone = {
        label: SequenceCost(policy, rank, model.windows, eviction=use.eviction)
        for label, policy in [(FP16_POLICY.name, FP16_POLICY), *fitting]
    }
    return Capacity(
        model=name,
        layers=model.kv.layers,
        q_heads=model.q_heads,
        kv_heads=model.kv.kv_heads,
        kv_heads_of_a_gpu=model.kv_heads_of_a_rank(use.tensor_parallel),
        head_dim=model.kv.head_dim,
        use=use,
        budget=budget,
        cache_bytes=budget.cache,
        ceiling_bytes=use.below_ceiling(budget.cache),
        block_waste=1 - held / slots,
        notes=notes,
        policies=[_policy_capacity(label, policy, model, rank, use, budget, alone) for label, policy in fitting],
        unfit=unfit,
    )


def _policy_capacity(
    name: str,
    policy: KVPolicy,
    model: ModelShape,
    rank: KVShape,
    use: CapacityConfig,
    budget: Budget,
    alone: Mapping[str, SequenceCost],
) -> PolicyCapacity:
    limit, cycle = use.below_ceiling(budget.cache), use.cycle
    cost = _cost(policy, model, rank, use)
    admitted = admit(cost, cycle, limit)
    fit = budget.cache // policy.bytes_per_token(rank)
    plain = alone[name]
    bytes_of_a_mix = sum(cost.own(tokens).gpu for tokens in cycle)
    return PolicyCapacity(
        policy=policy,
        name=name,
        token_bytes=_token_bytes(policy, model.kv),
        token_bytes_of_a_gpu=policy.bytes_per_token(rank),
        exact_bytes=cost.exact_bytes,
        window_bytes=policy.window_pages(use.longest) * policy.window_page_bytes(rank),
        tokens_that_fit=fit,
        tokens_at_ceiling=round(Fraction(str(use.ceiling)) * fit),
        requests=admitted.requests,
        live_tokens=admitted.live_tokens,
        used_bytes=admitted.gpu_bytes,
        mix_bytes=bytes_of_a_mix,
        requests_by_context={tokens: admit(cost, [tokens], limit).requests for tokens in _lengths(use)},
        requests_without={
            what: admit(other, cycle, limit).requests for what, other in _without(policy, model, rank, use).items()
        },
        smaller_than={label: _smaller_from(plain, other) for label, other in alone.items() if label != name},
        outweighs_weights_from=holds_from(
            lambda tokens: use.concurrency * plain.alone(tokens) - budget.weights,
            plain.borders,
            plain.settled_pages,
            use.concurrency * plain.growth,
        ),
        by_heads={
            label: policy.bytes_per_token(KVShape(model.kv.layers, heads, model.kv.head_dim))
            for label, heads in _heads(model).items()
        },
        by_ranks={
            ranks: policy.bytes_per_token(KVShape(model.kv.layers, model.kv_heads_of_a_rank(ranks), model.kv.head_dim))
            for ranks in sorted({*RANKS, use.tensor_parallel})
            if _divides(model, ranks)
        },
        offload=None
        if use.offload_share == 0
        else Offload(host_bytes=admitted.host_bytes, ms_per_step=admitted.host_bytes / use.link_gb_per_s / 1e6),
    )


def _cost(policy: KVPolicy, model: ModelShape, rank: KVShape, use: CapacityConfig) -> SequenceCost:
    return SequenceCost(
        policy,
        rank,
        model.windows,
        shared_prefix=use.shared_prefix_tokens,
        eviction=use.eviction,
        offload_share=use.offload_share,
    )


def _smaller_from(ours: SequenceCost, theirs: SequenceCost) -> int | None:
    return holds_from(
        lambda tokens: theirs.alone(tokens) - ours.alone(tokens),
        ours.borders | theirs.borders,
        max(ours.settled_pages, theirs.settled_pages),
        theirs.growth - ours.growth,
    )


def _without(policy: KVPolicy, model: ModelShape, rank: KVShape, use: CapacityConfig) -> dict[str, SequenceCost]:
    """The cost without each thing that the policy, the model or the use has."""
    found: dict[str, SequenceCost] = {}
    if policy.exact_tokens:
        plainer = policy.model_copy(update={"sink_tokens": 0, "recent_tokens": 0})
        found["sinks and recent tokens"] = _cost(plainer, model, rank, use)
    if policy.window is not None:
        found["finer window"] = _cost(policy.model_copy(update={"window": None}), model, rank, use)
    if any(window is not None for window in model.windows):
        found["sliding layers"] = SequenceCost(
            policy,
            rank,
            [None] * len(model.windows),
            shared_prefix=use.shared_prefix_tokens,
            eviction=use.eviction,
            offload_share=use.offload_share,
        )
    if use.shared_prefix_tokens:
        found["shared prefix"] = _cost(policy, model, rank, use.model_copy(update={"shared_prefix_tokens": 0}))
    if use.eviction is not None or policy.eviction is not None:
        keeping = policy.model_copy(update={"eviction": None})
        found["eviction"] = _cost(keeping, model, rank, use.model_copy(update={"eviction": None}))
    if use.offload_share:
        found["offload"] = _cost(policy, model, rank, use.model_copy(update={"offload_share": 0.0}))
    return found


def _token_bytes(policy: KVPolicy, shape: KVShape) -> TokenBytes:
    keys = values = scales = 0
    for layer in range(shape.layers):
        for side, form in policy.sides(layer).items():
            size = shape.kv_heads * form.token_bytes(shape.head_dim)
            if side.in_window:
                continue
            keys, values = (keys + size, values) if side.is_key else (keys, values + size)
            scales += size - shape.kv_heads * form.code_bytes(shape.head_dim)
    return TokenBytes(keys=keys, values=values, scales=scales)


def _lengths(use: CapacityConfig) -> list[int]:
    """Powers of two."""
    lengths = [SHORTEST]
    while lengths[-1] < max(LONGEST, use.longest):
        lengths.append(2 * lengths[-1])
    return [tokens for tokens in lengths if tokens > use.shared_prefix_tokens]


def _heads(model: ModelShape) -> dict[str, int]:
    kind = {model.q_heads: "MHA", 1: "MQA"}.get(model.kv.kv_heads, "GQA")
    return {"MHA": model.q_heads, kind: model.kv.kv_heads, "MQA": 1}


def _divides(model: ModelShape, ranks: int) -> bool:
    try:
        model.kv_heads_of_a_rank(ranks)
    except UserError:
        return False
    return True
