"""The canary: a candidate with a strong fault that must be noticed, and a ladder of small ones: which were is said.

All of them are planted between prefill and decode, so that what decoding reads is wrong and nothing else.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from pipeline.core.engine import Engine
from pipeline.core.kv import PAGE_TOKENS, KVPolicy, KVShape, Side
from pipeline.core.records import Progress
from pipeline.core.workloads import WorkloadsConfig
from pipeline.verdict.report import Canary, Rung, SampleRow
from stages.evaluate.decoding.noise import canary_samples
from stages.evaluate.decoding.rows import labelled, run_samples, unjudged_rows
from stages.evaluate.distances.scores import Heads
from stages.evaluate.inputs.tokens import EncodedSample
from stages.evaluate.twins.conformance import Comparison
from stages.evaluate.twins.twin import Twin


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
    twin: Twin | None = None,
) -> Canary:
    """Run forced decode that reads wrong keys: prefill some samples together, corrupt the key scale once, then decode.

    Args:
        engine: A candidate of its own, which keeps the strong fault.
        encoded: The samples of the round.
        heads: The baseline's distributions of these.
        config: Size of the canary, and its factor.
        progress: Called with what is being done, and how much of how much.
        twin: The candidate's twin, beside which small faults show.
    """
    subset = canary_samples(encoded, config)
    ladder = (
        _ladder(engine, [_rung_sample(encoded, engine.policy)], heads, progress, twin)
        if engine.can(Engine.corrupt_scale)
        else []
    )
    progress = labelled(progress, "canary: ")
    rows = _decoded(engine, subset, heads, partial(engine.corrupt_key_scale, config.canary_factor), progress)
    return Canary(factor=config.canary_factor, rows=rows, ladder=ladder)


def small_faults(policy: KVPolicy, shape: KVShape) -> list[SmallFault]:
    """Return the ladder from its top: keys of one head, values of one layer, one page, in the middle of the model.

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
        *(scaled(f"key scale x{factor:g} {place}", Side.KEY, factor, head) for factor in (2.0, 1.25, 1.05)),
        scaled(f"values x1.1 in layer {layer}", Side.VALUE, 1.1, None),
        SmallFault("a stale page", lambda engine: engine.repeat_page(), lambda _: None),
    ]


def _rung_sample(encoded: Sequence[EncodedSample], policy: KVPolicy) -> EncodedSample:
    """Return the shortest sample that reads two quantized pages: a rung costs a prompt, and a replay of it."""
    window = policy.window.tokens if policy.window is not None else 0
    least = policy.exact_tokens + window + 2 * PAGE_TOKENS
    by_length = sorted(encoded, key=lambda item: len(item.prompt))
    return next((item for item in by_length if len(item.prompt) > least), by_length[-1])


def _ladder(
    engine: Engine,
    chosen: Sequence[EncodedSample],
    heads: Heads,
    progress: Progress,
    twin: Twin | None,
) -> list[Rung]:
    """Run the chosen sample with each of the small faults, through the steps that serve.

    Beside the twin a small fault shows on any long sample, and each costs a decode and a replay of it.
    """
    rungs = []
    faults = small_faults(engine.policy, engine.shape)
    for number, fault in enumerate(faults, start=1):
        named = labelled(progress, f"canary {number} of {len(faults)}, {fault.name}: ")
        every = range(len(chosen))
        beside = None if twin is None else Comparison(engine, twin, chosen, every, batch_size=len(chosen), progress=named)
        rows = _decoded(engine, chosen, heads, partial(fault.plant, engine), named, beside, one_pass=False)
        fault.take_back(engine)
        rungs.append(Rung(fault=fault.name, rows=rows, requests=[] if beside is None else beside.requests))
    return rungs


def _decoded(
    engine: Engine,
    subset: Sequence[EncodedSample],
    heads: Heads,
    corrupt: Callable[[], None],
    progress: Progress,
    beside: Comparison | None = None,
    *,
    one_pass: bool = True,
) -> list[SampleRow]:
    """Decode samples with a fault that is planted after their prefill; return how far they are from the baseline."""
    results = run_samples(
        engine,
        subset,
        heads,
        len(subset),  # one batch: there is one prefill, and the corruption comes after it
        progress,
        after_prefill=corrupt,
        one_pass=one_pass,
        observe=(lambda _: None) if beside is None else beside.take,
    )
    return unjudged_rows(subset, results)
