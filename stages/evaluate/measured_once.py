"""Makes the measurements that an engine needs only once: noise, must-fail control, times, memory, stress test, free answers,
and a full pool."""

from collections.abc import Sequence
from functools import partial
from math import log10
from pathlib import Path

from stages.core.records import Progress
from stages.engines.interface import Engine, SupportsForced, SupportsRequests
from stages.engines.reference.engine import TorchEngine
from stages.evaluate.conformance.comparer import ReferenceEngine
from stages.evaluate.conformance.stress_test import run_stress_test
from stages.evaluate.decoding.decode import StoppingCriteria, shares
from stages.evaluate.decoding.free import free_answers
from stages.evaluate.decoding.full_pool import fill_pool_with_samples
from stages.evaluate.decoding.stored import LOGPROBS, SampleResult, read_round
from stages.evaluate.decoding.system import measure_system
from stages.evaluate.distances.distance import LogProbsReader, join_statistics, stored_logprobs
from stages.evaluate.inputs.tokens import BundleTokenizer, EncodedSample, control_samples, count_tokens, repeated_samples
from stages.evaluate.joining import fidelity, make_row
from stages.evaluate.measure import prefix_labels, run_samples
from stages.policies.policy import PAGE_TOKENS
from stages.verdict.conformance import EngineConformance
from stages.verdict.coverage import Exercised
from stages.verdict.report import CacheStatistics, EngineTests, SampleRow, StressResult
from stages.workloads.config import CONTROL_FACTOR, WorkloadsConfig

MAX_STATISTICS_TOKENS = 512
"""Maximum number of tokens whose keys and values are measured."""


def measure_once(
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
    serves: bool = True,
) -> EngineTests:
    """Measure an engine on some samples of the first round and on random tokens.

    The engine holds no sequences afterwards. The must-fail control runs last and corrupts a candidate, which must not be used
    afterwards.

    Args:
        measured: Directory that `measure` wrote for the engine in the first round.
        reference: The reference engine for the stress test and the cache's statistics of a candidate; None skips both.
        baseline: The baseline's directory; None for the baseline itself, which is never served and needs no further tests.
        planned: The samples of all rounds. The verdict covers the length of the longest.
        serves: Whether the engine may still be served: it needs a stress test and a full pool.
    """
    first_round = read_round(measured if baseline is None else baseline)
    encoded = first_round.scored(encoded)
    subset = repeated_samples(encoded, config)
    stopping = StoppingCriteria(tokenizer.stop_tokens(config), config.extra_new_tokens)
    label = progress if baseline is not None else prefix_labels(progress, "baseline: ")
    repeated = _rerun_samples(engine, subset, config.batch_size, stored_logprobs(measured / LOGPROBS), stopping, label)
    # Distances of the repeated samples from the engine's own first results.
    noise = fidelity(join_statistics([result.statistics for result in repeated])) if repeated else None
    if baseline is None:
        return EngineTests(free_answers=None, noise=noise, system=measure_system(engine, config.load, label))
    longest = max(map(stopping.longest, [*planned, *encoded]))
    free = free_answers(engine, subset, config.batch_size, stopping, label, [result.answer for result in repeated])
    cache, stress = list[CacheStatistics](), None
    if reference is not None:
        item = max([*planned, *encoded], key=lambda item: len(item.prompt))
        cache = cache_statistics(reference.engine, [*item.prompt, *item.reference])
        if serves:
            stress = _stress_test(engine, reference, encoded, planned, longest, config, label, first_round.conformance)
    system = measure_system(engine, config.load, label)
    count = engine.full_pool_requests if config.full_pool is None else config.full_pool
    full_pool = fill_pool_with_samples(engine, encoded, count, label) if serves else None
    # The last test, because it corrupts the engine for good.
    control = must_fail_control(engine, encoded, stored_logprobs(baseline / LOGPROBS), label)
    return EngineTests(
        system=system,
        free_answers=free,
        noise=noise,
        coverage=Exercised.merged([*(result.trace for result in repeated), Exercised(room=longest)]),
        stress=stress,
        full_pool=full_pool,
        control=control,
        cache=cache,
    )


def cache_statistics(engine: TorchEngine, tokens: Sequence[int]) -> list[CacheStatistics]:
    """Measure ranges and signal-to-noise ratios of keys and values by layer: of the first tokens, in the policy's formats."""
    measured = []
    for layer, side, computed, stored in engine.states(tokens[:MAX_STATISTICS_TOKENS]):
        signal, noise = (float(x.double().pow(2).sum()) for x in (computed, stored - computed))
        measured.append(
            CacheStatistics(
                layer=layer,
                side="key" if side.is_key else "value",
                low=float(computed.min()),
                high=float(computed.max()),
                p999=float(computed.abs().flatten().quantile(0.999)),
                snr_db=10 * (log10(signal) - log10(noise)) if signal and noise else None,
            )
        )
    return measured


def _rerun_samples(
    engine: Engine,
    samples: Sequence[EncodedSample],
    batch: int,
    own_logprobs: LogProbsReader,
    stopping: StoppingCriteria,
    progress: Progress,
) -> list[SampleResult]:
    """Run samples of the first round again for the noise floor. `own_logprobs` and `batch` are of the first run."""
    label = prefix_labels(progress, "noise floor: ")
    # An engine that serves whole requests would send every single decode step as a request, so it repeats whole requests.
    in_requests = isinstance(engine, SupportsRequests)
    # Samples that the first run computed in one pass are now decoded token by token, in full batches.
    size = batch if isinstance(engine, SupportsForced) and not in_requests else other_batch_size(batch, len(samples))
    size = min(size, engine.max_sequences or size)
    return run_samples(engine, samples, size, own_logprobs, progress=label, stopping=stopping, one_pass=in_requests)


def _stress_test(
    engine: Engine,
    reference: ReferenceEngine,
    encoded: Sequence[EncodedSample],
    planned: Sequence[EncodedSample],
    longest: int,
    config: WorkloadsConfig,
    progress: Progress,
    baseline_error: EngineConformance | None,
) -> StressResult:
    limits = config.stress_test.limited(longest)
    own_tokens = count_tokens(planned, once=shares(engine, config.batch_size)) if config.user_path else None
    texts = [item.prompt for item in encoded]
    return run_stress_test(engine, reference, limits, config.batch_size, longest, progress, baseline_error, own_tokens, texts)


def other_batch_size(batch: int, samples: int) -> int:
    """Return a batch size other than the first run's: usually a quarter of the sequences that it decoded together."""
    if batch == 1:
        return 2
    together = min(batch, samples)
    return max(1, min(2, together - 1), together // 4)


def must_fail_control(
    engine: Engine, encoded: Sequence[EncodedSample], logprobs: LogProbsReader, progress: Progress
) -> list[SampleRow]:
    """Run forced decode with wrong keys: prefill some samples together, corrupt the key scale once, then decode.

    The gates must detect the fault. The scale is corrupted after the prefill, so that only the reads of the decode path are
    wrong. It stays corrupted, so the engine must not be used afterwards. `logprobs` are the baseline's.
    """
    policy = engine.policy
    min_tokens = policy.exact_tokens + 2 * PAGE_TOKENS + (policy.window.tokens if policy.window is not None else 0)
    subset = control_samples(encoded, min_tokens)[: engine.max_sequences]
    label = prefix_labels(progress, "must-fail control: ")
    corrupt = partial(engine.corrupt_key_scale, CONTROL_FACTOR)
    # All samples are in one batch, so that there is one prefill.
    results = run_samples(engine, subset, len(subset), logprobs, progress=label, after_prefill=corrupt)
    return [make_row(item, result.statistics, None, None) for item, result in zip(subset, results, strict=True)]
