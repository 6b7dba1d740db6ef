"""Measures system metrics: times of a fixed generation load, and memory of the cache.

Times are only reported: by default no gate judges them.
"""

import random
import resource
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import psutil

from stages.core.memory import GIB, return_freed
from stages.core.records import LoadTimes, Progress, no_progress
from stages.engines.interface import Engine, SupportsRequests
from stages.policies.policy import PAGE_TOKENS, live_tokens
from stages.verdict.report import SystemMetrics
from stages.workloads.config import LIVE_GIB, LIVE_SEQUENCE_TOKENS, WARMUP_STEPS, LoadConfig

SEED = 0
STATM = Path("/proc/self/statm")
"""Linux file that reports the resident memory pages of this process."""


def measure_system(engine: Engine, load: LoadConfig, progress: Progress = no_progress) -> SystemMetrics:
    """Run a load on an engine: prefill its prompts one by one, then decode them together, timed.

    The time to the first token is the median over the prompts; warm-up steps are not timed. `progress` is called between timed
    operations, or only once if the engine times itself.
    """
    rng = random.Random(SEED)
    prompts = [[rng.randrange(engine.vocab_size) for _ in range(load.context_tokens)] for _ in range(load.batch)]
    steps = WARMUP_STEPS + load.new_tokens
    progress("system metrics", 0, 1)
    before = _processor_seconds()
    own_process = not isinstance(engine, SupportsRequests)
    times = (
        engine.timed(prompts, steps) if isinstance(engine, SupportsRequests) else _time_load(engine, prompts, steps, progress)
    )
    foreign, total = np.subtract(_processor_seconds(), before)
    step_ms, memory = times.step_ms[WARMUP_STEPS:], times.memory
    p50, p95, p99 = np.percentile(step_ms, [50, 95, 99]).tolist()
    budget = int(LIVE_GIB * GIB)
    return SystemMetrics(
        time_to_first_token_ms=float(np.median(times.first_token_ms)),
        decode_tokens_per_s=load.batch * len(step_ms) / (sum(step_ms) / 1e3),
        others_share=min(1.0, max(0.0, float(foreign / total))) if own_process and total > 0 else None,
        inter_token_p50_ms=p50,
        inter_token_p95_ms=p95,
        inter_token_p99_ms=p99,
        kib_per_token=engine.policy.bytes_per_token(engine.shape) / 1024,
        kib_per_token_allocated=memory.pool_bytes / (memory.pages * PAGE_TOKENS) / 1024,
        pool_bytes=memory.pool_bytes,
        attention=engine.attention,
        max_live_tokens=live_tokens(engine.policy, engine.shape, budget, LIVE_SEQUENCE_TOKENS),
    )


def _processor_seconds() -> tuple[float, float]:
    """Return processor seconds since the machine started: used by other programs and the hypervisor, and in total."""
    times = psutil.cpu_times()[:8]  # user, nice, system, idle, iowait, irq, softirq, steal; the rest is counted in `user`
    return sum(times) - sum(times[3:5]) - time.process_time(), sum(times)


def _time_load(engine: Engine, prompts: Sequence[Sequence[int]], steps: int, progress: Progress) -> LoadTimes:
    """Time one prefill per prompt, then greedy decode steps of all sequences together. Times are wall-clock times."""
    first_token_ms = []
    sequences: list[int] = []
    tokens: list[int] = []
    for done, prompt in enumerate(prompts):
        progress("system metrics: prefill [prompts]", done, len(prompts))
        started = time.perf_counter()
        handles, logits = engine.prefill([prompt])
        tokens.append(int(logits[0].argmax()))
        first_token_ms.append((time.perf_counter() - started) * 1e3)
        sequences += handles
    step_ms = []
    for done in range(steps):
        progress("system metrics: decode [steps]", done, steps)
        started = time.perf_counter()
        tokens = engine.decode(sequences, tokens).argmax(axis=1).tolist()
        step_ms.append((time.perf_counter() - started) * 1e3)
    memory = engine.memory()
    engine.release(sequences)
    return LoadTimes(first_token_ms, step_ms, memory)


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes, after returning freed memory to the system."""
    return_freed()
    return int(STATM.read_text().split()[1]) * resource.getpagesize()


def wrong_allocation(engine: Engine) -> str:
    """Return how the bytes of an engine's cache differ from its policy's claim for the same number of pages; "" if equal."""
    memory, policy, shape = engine.memory(), engine.policy, engine.shape
    claimed, unit = policy.pool_bytes(shape, memory.pages), policy.exact_bytes(shape, 1)
    window = memory.window_pages * policy.window_page_bytes(shape)
    if memory.pool_bytes != claimed:
        allocated, expected = (size / max(1, memory.pages * PAGE_TOKENS) for size in (memory.pool_bytes, claimed))
        return f"{allocated:.5g} bytes a token are allocated, the policy claims {expected:.5g}"
    if memory.exact_bytes % unit if unit else memory.exact_bytes:
        return f"{memory.exact_bytes} bytes are allocated for the exact tokens, the policy claims {unit} each"
    if memory.window_bytes != window:
        return f"{memory.window_bytes} bytes are allocated for the window, the policy claims {window}"
    return ""
