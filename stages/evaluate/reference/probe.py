"""The stress test: an engine beside the reference engine on random tokens, in states that samples rarely reach.

Scenarios (`scenarios.py`) take both to the longest context and the largest batch, over every page offset, through turns, forks,
long decoding, free answers, and a crowd. Each sequence is judged as conformance judges a request: its logits over the codes
that the engine stored, and these codes by themselves.
"""

import secrets
import time
from collections.abc import Iterator

from pipeline.core.engine import Engine
from pipeline.core.errors import UserError
from pipeline.core.records import Progress
from pipeline.core.workloads import ProbeConfig
from pipeline.verdict.conformance import EngineConformance
from pipeline.verdict.coverage import Probe
from stages.evaluate.decoding.system import allocation, process_memory
from stages.evaluate.reference.engine import ReferenceEngine
from stages.evaluate.reference.scenarios import SCENARIOS
from stages.evaluate.reference.stress import StressTest

COUNTS = (
    *("tokens", "decoded", "batch", "requests", "rows", "together", "prompts", "forks", "turns", "prefixes", "steps"),
    "preempted",
)
"""Fields of `Probe` that a `StressTest` counts."""

IDLE_SECONDS = 1 / 50
"""Seconds that an engine is idle while a sequence is live, for each request of `workloads.probe.requests`."""


def probe(
    engine: Engine,
    reference: ReferenceEngine,
    config: ProbeConfig,
    batch_size: int,
    claimed: int,
    progress: Progress,
    baseline: EngineConformance | None = None,
) -> Probe:
    """Run an engine beside the reference engine on random tokens.

    Args:
        engine: The engine. No sequence is left in it.
        reference: The reference engine under the same policy.
        config: How far the test goes.
        batch_size: Sequences in a decode step of the evaluation; the test's largest batch is at least that.
        claimed: Tokens of the longest sample, which several rows of the largest batch have.
        progress: Called with how many scenarios have ended.
        baseline: How far the 16-bit engine is from its own reference, which a candidate may be as well; None for that engine.
    """
    max_tokens = min(limit for limit in (config.max_tokens, engine.max_tokens, reference.model_tokens) if limit is not None)
    if engine.can(Engine.forced_together):
        max_tokens -= 1  # a request also generates the token after its last known one
    largest = max(batch_size, config.max_batch)
    largest = min(largest, engine.max_batch or largest, engine.max_sequences or largest)
    held = process_memory(engine, max_tokens)
    seed = secrets.randbits(32) if config.seed is None else config.seed
    test = StressTest(engine, reference, config, max_tokens, largest, claimed, *reference.limits(baseline), seed=seed)
    for ended in _run_scenarios(test):
        progress("stress test [scenarios]", ended, len(SCENARIOS))
    said = [*sorted(test.failures, key=lambda text: not text.startswith("isolation")), *test.deviations()]
    if engine.can(Engine.forget_prefixes):
        engine.forget_prefixes()
    left = engine.memory()
    if left.live_tokens or left.held_pages:
        what = f"{left.live_tokens} tokens and {left.held_pages} pages"
        said.append(f"{what} stayed in the cache after every sequence was released")
    return Probe(
        seed=seed,
        page_offsets=len(test.offsets),
        failures=said,
        allocation=(test.allocation or allocation(engine)).model_copy(update={"process": held}),
        **{name: getattr(test, name) for name in COUNTS},
    )


def _run_scenarios(test: StressTest) -> Iterator[int]:
    """Run the scenarios that the engine is able to, and yield how many have ended, before the first and after each.

    A sequence rests through all of them, with a token after each, and once for `IDLE_SECONDS` a request.
    """
    yield 0
    engine = test.engine
    if not engine.can(Engine.forced_together) and (engine.max_sequences is None or engine.max_sequences > test.largest):
        test.scenario = "rest"
        test.resting = test.sequence("a sequence that rests while others come and go", test.length(40, 90))
        test.prefill(test.resting)
    for ended, scenario in enumerate(SCENARIOS, start=1):
        if all(test.engine.can(need) for need in scenario.needs):
            test.scenario = scenario.name
            try:
                scenario.run(test)
            except UserError as error:
                test.failures.append(f"{scenario.name}: the engine refused it: {error}")
            test.end()
            if test.resting is not None:
                test.decode(test.resting)
        yield ended
    if test.resting is not None:
        test.scenario, resting, test.resting = "rest", test.resting, None
        time.sleep(max(0.0, IDLE_SECONDS * test.config.requests - test.idle))
        test.decode(resting, steps=4)
        test.end()
