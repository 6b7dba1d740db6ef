"""Scored tokens per second of forced decode: the ONNX engine and the one-pass oracle beside transformers' caches.

    python -m benchmarks.forced_decode --json benchmarks/results/forced_decode.json

Every contender gets the same sequences of a first token and `context` more, the same float32 weights and one thread, and
returns the logits of all `context` positions, each computed from a quantized cache of the tokens before it. Contenders that
decode step by step feed one token of each sequence per step. Their steps are timed in cycles of 128, the period at which a
QuantizedCache requantizes its whole content. Of long sequences four evenly spaced cycles are run, each after an untimed
prefill of the tokens before it, which leaves everything quantized, as a run from the start does at that length. The oracle's
time is that of whole passes, one sequence after the other. README.md has the details.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from benchmarks import benchlib, peers
from benchmarks.recording import log, results_record, write_json
from benchmarks.slope import step_slope
from stages.engines.onnx.engine import OnnxEngine, load_engine
from stages.engines.oracle.engine import OracleEngine

CYCLE = peers.RESIDUAL
"""Steps from one requantization of a QuantizedCache to the next."""

SAMPLED_CYCLES = 4
"""Cycles that are timed: evenly spaced, the first and the last included. Their mean is the mean of all cycles when a step's
time is linear in the length."""

FIRST = 1
"""Tokens at the start of a sequence that are not scored, since nothing precedes them."""

FORWARD = "forward"
"""Name of the plain forward pass among the results."""

SLICE = 16
"""Steps of a contender's turn. Turns are short so that a disturbance of the machine affects all contenders."""

Tokens = npt.NDArray[np.int64]


class Contender(Protocol):
    """Decodes a batch of sequences step by step: one token of each sequence per step."""

    def start(self, prompts: Tokens) -> None:
        """Prefill prompts (B, S)."""

    def step(self, tokens: list[int]) -> Any:
        """Decode one token of each sequence; returns logits (B, V)."""

    def stop(self) -> None:
        """Release the cache."""


class EngineContender:
    """An ONNX engine as a contender."""

    def __init__(self, engine: OnnxEngine) -> None:
        self.engine = engine
        self.handles: list[int] = []

    def start(self, prompts: Tokens) -> None:
        self.handles, _ = self.engine.prefill(prompts.tolist())

    def step(self, tokens: list[int]) -> Any:
        return self.engine.decode(self.handles, tokens)

    def stop(self) -> None:
        self.engine.release(self.handles)


def sampled_cycles(context: int) -> list[int]:
    """Return the numbers of the cycles that are timed."""
    last = context // CYCLE - 1
    return sorted({round(i * last / (SAMPLED_CYCLES - 1)) for i in range(SAMPLED_CYCLES)})


def cycle_seconds(contenders: dict[str, Contender], tokens_BT: Tokens, start: int) -> dict[str, float]:
    """Return the seconds that each contender needs for the 128 steps after the first `start` tokens."""
    for contender in contenders.values():
        contender.start(tokens_BT[:, :start])
    seconds = dict.fromkeys(contenders, 0.0)
    for begin in range(start, start + CYCLE, SLICE):
        for name, contender in contenders.items():
            steps = [tokens_BT[:, t].tolist() for t in range(begin, begin + SLICE)]
            clock = time.perf_counter()
            for step in steps:
                contender.step(step)
            seconds[name] += time.perf_counter() - clock
    for contender in contenders.values():
        contender.stop()
    return seconds


def oracle_seconds(oracle: OracleEngine, tokens_BT: Tokens) -> float:
    """Return the seconds that the oracle needs to score all sequences."""
    clock = time.perf_counter()
    for row in tokens_BT.tolist():
        oracle.forced(row, FIRST)
    return time.perf_counter() - clock


@torch.inference_mode()
def forward_seconds(model: Any, tokens_BT: Tokens) -> float:
    """Return the seconds of one forward pass over the whole batch without a cache, near which scoring has its limit."""
    ids = torch.from_numpy(tokens_BT[:, :-1])
    clock = time.perf_counter()
    model(ids, use_cache=False)
    return time.perf_counter() - clock


def measure(
    contenders: dict[str, Contender], passes: dict[str, Callable[[], float]], tokens_BT: Tokens, rounds: int
) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """Time all contenders and passes over the same sequences.

    Args:
        contenders: Step-by-step contenders by name.
        passes: Functions that run one-pass contenders and return their seconds, by name.
        tokens_BT: Token ids (B, FIRST + context).
        rounds: Repetitions of everything.

    Returns:
        Medians over rounds in seconds, by name: all steps of each contender, the last cycle of each contender, and the passes.
    """
    context = tokens_BT.shape[1] - FIRST
    cycles = sampled_cycles(context)
    runs: dict[str, dict[int, list[float]]] = {name: {cycle: [] for cycle in cycles} for name in contenders}
    passed: dict[str, list[float]] = {name: [] for name in passes}
    for _ in range(rounds):
        for cycle in cycles:
            for name, seconds in cycle_seconds(contenders, tokens_BT, FIRST + cycle * CYCLE).items():
                runs[name][cycle].append(seconds)
        for name, run in passes.items():
            passed[name].append(run())
    median: Callable[[Sequence[float]], float] = statistics.median
    count = context // CYCLE
    whole = {name: count * statistics.mean(map(median, by_cycle.values())) for name, by_cycle in runs.items()}
    tail = {name: median(by_cycle[cycles[-1]]) for name, by_cycle in runs.items()}
    return whole, tail, {name: median(seconds) for name, seconds in passed.items()}


def rows(
    policies: Sequence[str],
    context: int,
    batch: int,
    whole: dict[str, float],
    tail: dict[str, float],
    passes: dict[str, float],
) -> list[dict[str, Any]]:
    """Return one result per policy. Ratios are against the fastest QuantizedCache of the same context and batch."""
    scored, last = batch * context, batch * CYCLE
    best = min(peers.QUANTIZED, key=lambda name: whole[name])
    best_tail = min(peers.QUANTIZED, key=lambda name: tail[name])
    out = []
    for policy in policies:
        oracle = passes[policy]
        out.append({
            "context": context, "batch": batch, "policy": policy, "scored_tokens": scored,
            "oracle_tokens_per_s": scored / oracle,
            "engine_tokens_per_s": scored / whole[policy],
            **{f"{name}_tokens_per_s": scored / whole[name] for name in peers.CACHES},
            "forward_tokens_per_s": scored / passes[FORWARD],
            "best_quantized_cache": best,
            "oracle_ratio": whole[best] / oracle,
            "engine_ratio": whole[best] / whole[policy],
            "forward_ratio": whole[best] / passes[FORWARD],
            "tail": {
                "oracle_tokens_per_s": last / oracle,
                "engine_tokens_per_s": last / tail[policy],
                **{f"{name}_tokens_per_s": last / tail[name] for name in peers.CACHES},
                "best_quantized_cache": best_tail,
                "oracle_ratio": tail[best_tail] / oracle,
                "engine_ratio": tail[best_tail] / tail[policy],
            },
        })  # fmt: skip
    return out


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark with command-line arguments."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.forced_decode", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--contexts", type=_numbers, default=[512, 2048], help="scored tokens of a sequence, multiples of 128")
    parser.add_argument("--batch", type=_numbers, default=[1, 8], help="sequences of a batch, one or more sizes")
    parser.add_argument("--policies", default=",".join(benchlib.POLICIES), help=f"of {', '.join(benchlib.POLICIES)}")
    parser.add_argument("--rounds", type=int, default=1, help="repetitions of everything; figures are medians over them")
    parser.add_argument(
        "--slope-contexts", type=_numbers, default=[256, 512, 1024, 2048, 4096, 8192], help="cache lengths of the slope"
    )
    arguments = parser.parse_args(argv)
    names = arguments.policies.split(",")
    if any(context < CYCLE or context % CYCLE for context in arguments.contexts):
        parser.error(f"--contexts must be multiples of {CYCLE}, got {arguments.contexts}")
    if unknown := set(names) - set(benchlib.POLICIES):
        parser.error(f"--policies: unknown {', '.join(sorted(unknown))}; choose from {', '.join(benchlib.POLICIES)}")

    benchlib.require("optimum-quanto", "hqq")

    torch.set_num_threads(1)
    tokens = benchlib.story_tokens(max(arguments.batch), FIRST + max(arguments.contexts + arguments.slope_contexts))
    model = benchlib.load_model()
    shape = benchlib.model_shape(model)
    policies = [benchlib.load_policy(name) for name in names]
    oracles, engines = {}, {}
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as work:
        for policy in policies:
            scales = benchlib.static_scales(policy, model, tokens[:1, :1024])
            engines[policy.name] = load_engine(benchlib.make_bundle(policy, scales, Path(work)), threads=1)
            oracles[policy.name] = OracleEngine.from_model(benchlib.load_model(), policy, scales)
        contenders: dict[str, Contender] = {name: peers.Peer(model, name) for name in peers.CACHES}
        contenders |= {name: EngineContender(engine) for name, engine in engines.items()}
        for context in arguments.contexts:
            for batch in arguments.batch:
                log(f"context {context}, batch {batch}: {arguments.rounds} rounds")
                part = tokens[:batch, : FIRST + context]
                passes: dict[str, Callable[[], float]] = {
                    name: partial(oracle_seconds, oracle, part) for name, oracle in oracles.items()
                }
                passes[FORWARD] = partial(forward_seconds, model, part)
                results += rows(names, context, batch, *measure(contenders, passes, part, arguments.rounds))
                for row in results[-len(names) :]:
                    log(_line(row))
        slopes = {name: step_slope(engine, tokens[0], arguments.slope_contexts) for name, engine in engines.items()}
    content = results_record(
        results,
        bytes_per_token={
            **{policy.name: policy.bytes_per_token(shape) for policy in policies},
            **{name: peers.cache_bytes(model, name, tokens[:1, :512]) for name in peers.CACHES},
        },
        slope=slopes,
        rounds=arguments.rounds,
    )
    for row in results:
        row["bytes_per_token"] = {
            "policy": content["bytes_per_token"][row["policy"]],
            **{name: content["bytes_per_token"][name]["allocated"] for name in peers.CACHES},
        }
    for name, slope in slopes.items():
        log(f"{name}: {slope['us_per_1024_tokens']:.0f} us a step per 1,024 tokens, R^2 {slope['r_squared']:.4f}")
    write_json(arguments.json, content)


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _line(row: dict[str, Any]) -> str:
    rates = " ".join(f"{name} {row[f'{name}_tokens_per_s']:.0f}" for name in (FORWARD, "oracle", "engine", *peers.CACHES))
    tail = row["tail"]
    return (
        f"  {row['policy']:11s} tokens/s: {rates}; oracle {row['oracle_ratio']:.1f}x, engine {row['engine_ratio']:.2f}x "
        f"(last cycle {tail['oracle_ratio']:.1f}x, {tail['engine_ratio']:.2f}x)"
    )


if __name__ == "__main__":
    main()
