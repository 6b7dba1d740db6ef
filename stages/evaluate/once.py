"""What is measured of an engine once: noise, must-fail control, times, memory, stress test, free answers, reused prefixes,
a full pool."""

from collections.abc import Sequence
from pathlib import Path

from pipeline.core.engine import Engine
from pipeline.core.records import Progress
from pipeline.core.workloads import WorkloadsConfig
from pipeline.verdict.coverage import Exercised
from stages.evaluate.canary import canary
from stages.evaluate.decoding.free import free_answers, reused_prefixes
from stages.evaluate.decoding.noise import noise_floor, repeated_samples
from stages.evaluate.decoding.pressure import pressure
from stages.evaluate.decoding.rows import Run, greedy_of, labelled, run_samples
from stages.evaluate.decoding.speculation import speculated_by
from stages.evaluate.decoding.stored import LOGPROBS, Once, read_round
from stages.evaluate.decoding.system import measure_system
from stages.evaluate.distances.scores import StoredHeads
from stages.evaluate.inputs.tokens import BundleTokenizer, EncodedSample
from stages.evaluate.reference.engine import ReferenceEngine
from stages.evaluate.reference.probe import probe


def once(
    engine: Engine,
    encoded: Sequence[EncodedSample],
    tokenizer: BundleTokenizer,
    measured: Path,
    *,
    config: WorkloadsConfig,
    progress: Progress,
    reference: ReferenceEngine | None = None,
    baseline: Path | None = None,
    planned: Sequence[EncodedSample] = (),
) -> Once:
    """Measure an engine on some samples of the first round and beside them. No sequence is left in it.

    Args:
        engine: The engine. The must-fail control comes last and leaves its fault in a candidate, which is of no use afterwards.
        encoded: The samples of the first round.
        tokenizer: The tokenizer of the engine bundle.
        measured: What `measure` wrote of the engine in that round.
        config: Batch size, repeated samples, must-fail control, probe, and the load that is timed.
        progress: Called with a label, units done, and units in all.
        reference: What the stress test compares the engine with; None runs no stress test.
        baseline: What `measure` wrote of the baseline in that round; None for the baseline, which runs no control.
        planned: The samples of all rounds, the longest of which the claim is about.
    """
    answers = read_round(measured)
    first_round = answers if baseline is None else read_round(baseline)
    encoded = first_round.scored(encoded)
    subset, greedy, batch = repeated_samples(encoded, config), greedy_of(tokenizer, config), config.batch_size
    named = progress if baseline is not None else labelled(progress, "baseline: ")
    floor, own = labelled(named, "noise floor: "), StoredHeads(measured / LOGPROBS).sample
    usual = None if baseline is None else first_round.record.conformance
    if reference is not None:
        reference = reference.with_rounding_of(usual)
    # Another batch composition: a quarter of the sequences at once, pairs of few ones and where they ran one by one; batched
    # and token by token where they ran in one pass. Whole requests stay whole requests: each step of one would be a request
    # of its own.
    in_requests = engine.can(Engine.forced_together)
    together = min(batch, len(subset))
    fewer = max(1, min(2, together - 1), together // 4) if batch > 1 else 2
    size = batch if engine.can(Engine.forced) and not in_requests else fewer
    second = run_samples(engine, Run(subset, own, floor, greedy), size, one_pass=in_requests)
    longest = max(map(greedy.longest, [*planned, *encoded]))
    found = Once(
        noise=noise_floor(second),
        free_answers=free_answers(engine, subset, batch, greedy, named, [result.answer for result in second]),
        reused=reused_prefixes(engine, subset),
        speculated=speculated_by(engine, answers.answers_to(subset), subset, config.speculation, greedy),
        probe=None if reference is None else probe(engine, reference, config.probe, batch, longest, named, usual),
        system=measure_system(engine, config.load, named),
    )
    if baseline is None:
        return found
    asked = engine.pressed_requests if config.pressure is None else config.pressure
    crowded = pressure(engine, encoded, asked, named)
    repeated = Exercised.merged([*(result.trace for result in second), Exercised(room=longest)])
    heads = StoredHeads(baseline / LOGPROBS).sample
    corrupted = canary(engine, encoded, heads, config, named)
    return found.model_copy(update={"coverage": repeated, "canary": corrupted, "pressure": crowded})
