"""The must-fail control: a candidate with a strong fault that must be noticed, and a ladder of small ones up to one that is.

All of them are planted between prefill and decode, so that what decoding reads is wrong and nothing else.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from pipeline.core.engine import Engine
from pipeline.core.kv import PAGE_TOKENS, KVPolicy, KVShape, Side
from pipeline.core.records import Progress
from pipeline.core.workloads import CANARY_FACTOR, WorkloadsConfig
from pipeline.verdict.conformance import ALLOWED
from pipeline.verdict.report import Canary, Rung, SampleRow
from stages.evaluate.decoding.noise import canary_samples
from stages.evaluate.decoding.rows import Observer, Run, labelled, run_samples, unjudged_rows
from stages.evaluate.distances.scores import Heads
from stages.evaluate.inputs.tokens import EncodedSample
from stages.evaluate.reference.conformance import Comparison
from stages.evaluate.reference.engine import ReferenceEngine

KEY_FACTORS = (1.05, 1.25, 2.0)
"""Small factors of the key scales of one head."""


@dataclass(frozen=True)
class SmallFault:
    """A rung of the ladder: how it is planted in an engine, and taken back."""

    name: str
    plant: Callable[[Engine], None]
    take_back: Callable[[Engine], None]


def canary(
    engine: Engine,
    encoded: Sequence[EncodedSample],
    heads: Heads,
    config: WorkloadsConfig,
    progress: Progress,
    reference: ReferenceEngine | None = None,
    limit: float = ALLOWED,
) -> Canary:
    """Run forced decode that reads wrong keys: prefill some samples together, corrupt the key scale once, then decode.

    Args:
        engine: A candidate of its own, which keeps the strong fault.
        encoded: The samples of the round.
        heads: The baseline's distributions of these.
        config: Size of the must-fail control.
        progress: Called with what is being done, and how much of how much.
        reference: The candidate's reference, beside which small faults show.
        limit: The roundings from which on a request counts as off its reference.
    """
    policy, ladder = engine.policy, []
    least = policy.exact_tokens + 2 * PAGE_TOKENS + (policy.window.tokens if policy.window is not None else 0)
    subset = canary_samples(encoded, config, least)
    if engine.can(Engine.corrupt_scale):
        ladder = _ladder(engine, subset[:1], heads, progress, reference, limit)
    run = Run(subset, heads, labelled(progress, "must-fail control: "))
    rows = _decoded(engine, run, partial(engine.corrupt_key_scale, CANARY_FACTOR))
    return Canary(factor=CANARY_FACTOR, rows=rows, ladder=ladder)


def small_faults(policy: KVPolicy, shape: KVShape) -> list[SmallFault]:
    """Return the ladder from its lowest rung: keys of one head, values of one layer, one page, in the middle of the model.

    Where a layer's heads share one scale, a head's cannot be wrong alone.
    """
    layer = shape.layers // 2
    key = policy.sides(layer)[Side.KEY]
    shared = key.static_granularity == "per_tensor"
    place, head = (f"in layer {layer}", None) if shared else (f"in one head of layer {layer}", 0)

    def scaled(name: str, side: Side, factor: float, head: int | None) -> SmallFault:
        return SmallFault(
            name,
            lambda engine: engine.corrupt_scale(side, factor, layer, head),
            lambda engine: engine.corrupt_scale(side, 1 / factor, layer, head),
        )

    return [
        *(scaled(f"key scale x{factor:g} {place}", Side.KEY, factor, head) for factor in KEY_FACTORS),
        scaled(f"values x1.1 in layer {layer}", Side.VALUE, 1.1, None),
        SmallFault("a stale page", lambda engine: engine.repeat_page(), lambda _: None),
    ]


def _ladder(
    engine: Engine,
    chosen: Sequence[EncodedSample],
    heads: Heads,
    progress: Progress,
    reference: ReferenceEngine | None,
    limit: float,
) -> list[Rung]:
    """Run the chosen sample with one small fault after the other, through the steps that serve, until one is noticed.

    Each costs a decode and a replay of the sample, and beside the reference engine the first one shows already.
    """
    rungs: list[Rung] = []
    faults = small_faults(engine.policy, engine.shape)
    for number, fault in enumerate(faults):
        if rungs and _shows(rungs[-1], reference, limit):
            break
        named = labelled(progress, f"must-fail control {number + 1} of {len(faults)}, {fault.name}: ")
        every = range(len(chosen))
        run = Run(chosen, heads, named)
        beside = None if reference is None else Comparison(engine, reference, run, every, batch_size=len(chosen))
        observe = None if beside is None else beside.take
        rows = _decoded(engine, run, partial(fault.plant, engine), observe, one_pass=False)
        fault.take_back(engine)
        rungs.append(Rung(fault=fault.name, rows=rows, requests=[] if beside is None else beside.requests))
    return rungs


def _shows(rung: Rung, reference: ReferenceEngine | None, limit: float) -> bool:
    """Whether a fault shows beside a reference engine that the engine is judged by."""
    judged = reference is not None and reference.compute_dtype is not None
    return judged and any(request.times_allowed(limit) > 1 for request in rung.requests)


def _decoded(
    engine: Engine, run: Run, corrupt: Callable[[], None], observe: Observer | None = None, *, one_pass: bool = True
) -> list[SampleRow]:
    """Decode samples with a fault that is planted after their prefill; return how far they are from the baseline.

    They are one batch, so that there is one prefill.
    """
    results = run_samples(engine, run, len(run.encoded), after_prefill=corrupt, one_pass=one_pass, observe=observe)
    return unjudged_rows(run.encoded, results)
