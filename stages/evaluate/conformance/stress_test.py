"""The stress test: compares an engine with the reference engine on random tokens, in states that samples rarely reach.

The scenarios (`scenarios.py`) cover the longest context, the largest batch, every page offset, turns, forks, long decoding,
free answers, and many concurrent requests. Sequences are judged by the rules for requests in conformance: the logits given the
codes that the engine stored, and the codes themselves.
"""

import secrets
import time
from collections.abc import Sequence
from functools import partial

from stages.core.errors import UserError
from stages.core.records import Progress
from stages.engines.interface import Engine, SupportsFork, SupportsRequests
from stages.evaluate.conformance.comparer import ReferenceEngine, SequenceComparer
from stages.evaluate.conformance.operations import RESTING_TURN, StressTest
from stages.evaluate.conformance.scenarios import SCENARIOS
from stages.evaluate.conformance.walk import WAKES
from stages.evaluate.decoding.system import wrong_allocation
from stages.policies.policy import PAGE_TOKENS
from stages.verdict.conformance import EngineConformance
from stages.verdict.report import StressResult
from stages.workloads.config import StressTestConfig

IDLE_SECONDS = 1 / 50
"""Seconds per request of `stress_test.requests` that the engine idles with live sequences at the end: once before a step, and
half as long before a turn."""


def run_stress_test(
    engine: Engine,
    reference: ReferenceEngine,
    config: StressTestConfig,
    batch_size: int,
    claimed: int,
    progress: Progress,
    baseline: EngineConformance | None = None,
    asked: int | None = None,
    texts: Sequence[Sequence[int]] = (),
) -> StressResult:
    """Run the stress test on an engine, which holds no sequences afterwards. `reference` has the same policy.

    Args:
        batch_size: Batch size of the evaluation. The test's largest batch is at least this large.
        claimed: Tokens of the longest sample. Two rows of the largest batch reach this length.
        progress: Called with the number of computed tokens, and their approximate total.
        baseline: Conformance of the 16-bit engine, whose distances a candidate may also have; None if unknown.
        asked: Tokens of the user's own questions, which limit the size of the test; None to run the whole test.
        texts: Prompts of the questions, parts of which get free answers; random tokens without them.
    """
    max_tokens = min(limit for limit in (config.max_tokens, engine.max_tokens, reference.model_tokens) if limit is not None)
    if isinstance(engine, SupportsRequests):
        max_tokens -= 1  # a request also generates one token after its last fed token
    largest = max(batch_size, config.max_batch)
    largest = min(largest, engine.max_batch or largest, engine.max_sequences or largest)
    seed = secrets.randbits(32) if config.seed is None else config.seed
    comparer = SequenceComparer(engine, reference.with_limits_of(baseline))
    share = config.share(asked, max_tokens, claimed, largest)
    test = StressTest(comparer, config, max_tokens, largest, claimed, seed, share, texts, progress)
    _run_scenarios(test)
    failures = [*sorted(test.failures, key=lambda text: not text.startswith("isolation")), *test.deviations.messages()]
    left = engine.memory()
    if left.live_tokens or left.held_pages:
        what = f"{left.live_tokens} tokens and {left.held_pages} pages"
        failures.append(f"{what} stayed in the cache after every sequence was released")
    return StressResult(
        seed=seed,
        share=share,
        page_offsets=len(test.offsets),
        failures=failures,
        allocation=wrong_allocation(engine) if test.allocation is None else test.allocation,
        **test.counts,
    )


def _run_scenarios(test: StressTest) -> None:
    """Run the scenarios that the engine supports.

    Up to two sequences stay live during all scenarios, and advance during the walk and after each scenario. At the end they
    rest (see `IDLE_SECONDS`), together with a sequence whose neighbour has ended, and its forks.
    """
    engine = test.engine
    room = 2 if engine.max_sequences is None else engine.max_sequences - test.largest
    most = max(1, min((1 + test.scaled(2)) * PAGE_TOKENS, test.max_tokens - RESTING_TURN * (len(SCENARIOS) + 2 + WAKES)))
    test.scenario = "rest"
    names = ("an idle conversation", "an idle sequence")
    if not isinstance(engine, SupportsRequests) and room > 0:
        test.resting = [
            test.sequence(name, test.randint(min(PAGE_TOKENS + 1, most), most))
            for name in (names[:room] if isinstance(engine, SupportsFork) else names[1:])
        ]
        test.prefill(*test.resting)
    for run, needs in SCENARIOS.items():
        if all(isinstance(engine, need) for need in needs):
            test.scenario = run.__name__
            try:
                run(test)
            except UserError as error:
                test.failures.append(f"{test.scenario}: the engine refused it: {error}")
            test.wake()
            test.end()  # the engine idles during the comparison, after which the next scenario's prompts come first
    if test.resting:
        test.scenario = "rest"
        ending, idle = (test.sequence(name, most) for name in ("a sequence that ends", "an idle sequence after free pages"))
        try:
            test.prefill(ending, idle)
            test.release(ending)
            rows = [idle, test.resting[-1]]
            if isinstance(engine, SupportsFork):
                rows += [test.fork(idle, idle.name) for _ in range(test.largest // 2 - 1)]
            pause = IDLE_SECONDS * test.config.requests
            for seconds, advance in ((pause, partial(test.decode, *rows)), (pause / 2, test.wake)):  # `wake` begins with a turn
                time.sleep(seconds)
                advance()
            test.decode(*test.resting, steps=3)
        except UserError as error:
            test.failures.append(f"rest: the engine refused it: {error}")
        test.resting = []  # so that `end` releases them
        test.end()
