"""Prefill of 32,768 tokens and decode after it, on the ONNX engine and the oracle, within 8 GiB.

    python -m benchmarks.long_context --json benchmarks/results/long_context.json

Every engine and policy runs in a process of its own. Peak resident memory is the kernel's figure for that process: libraries,
weights and cache together. Exit code 3 when one of them was above the limit.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import benchlib
from benchmarks.recording import ROOT, log, results_record, write_json
from pipeline.core.engine import Engine
from stages.engines.onnx.engine import load_engine
from stages.engines.oracle.engine import OracleEngine

ENGINES = ("onnx", "oracle")
POLICIES = ("fp16", "fp8k_int4v", "int4_g64")
LIMIT_GIB = 8.0
CALIBRATION_TOKENS = 512


def run_one(engine_name: str, policy_name: str, tokens: int, steps: int) -> dict[str, Any]:
    """Prefill `tokens` tokens and decode `steps` more in this process. Returns times, cache sizes and peak memory."""
    torch.set_num_threads(1)
    ids = benchlib.story_tokens(1, tokens + steps)
    policy, model = benchlib.load_policy(policy_name), benchlib.load_model()
    shape = benchlib.model_shape(model)
    scales = benchlib.static_scales(policy, model, ids[:, :CALIBRATION_TOKENS])
    with tempfile.TemporaryDirectory() as work:
        engine: Engine
        if engine_name == "onnx":
            engine = load_engine(benchlib.make_bundle(policy, scales, Path(work)), threads=1)
        else:
            engine = OracleEngine.from_model(model, policy, scales)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        log(f"{engine_name} {policy_name}: prefill of {tokens} tokens")
        clock = time.perf_counter()
        handles, _ = engine.prefill([ids[0, :tokens].tolist()])
        prefilled = time.perf_counter()
        log(f"{engine_name} {policy_name}: {prefilled - clock:.1f} s; {steps} decode steps")
        for token in ids[0, tokens:].tolist():
            logits = engine.decode(handles, [token])
            assert logits.shape == (1, engine.vocab_size)
        decoded = time.perf_counter()
        memory = engine.memory()
    return {
        "engine": engine_name,
        "policy": policy_name,
        "tokens": tokens,
        "prefill_s": prefilled - clock,
        "decode_steps": steps,
        "decode_s": decoded - prefilled,
        "cache_mib": (memory.pool_bytes + memory.exact_bytes + memory.window_bytes) / 2**20,
        "policy_mib": policy.sequence_bytes(shape, tokens + steps) / 2**20,
        "loaded_rss_gib": before / 2**20,
        "peak_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def run_in_subprocess(engine: str, policy: str, tokens: int, steps: int) -> dict[str, Any]:
    """Run `run_one` in a new process and return its result."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.long_context",
        "--one",
        engine,
        policy,
        "--tokens",
        str(tokens),
        "--steps",
        str(steps),
    ]
    process = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, cwd=ROOT)
    result: dict[str, Any] = json.loads(process.stdout)
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark with command-line arguments. Returns the exit code."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.long_context", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--tokens", type=int, default=32768, help="tokens of the prefill")
    parser.add_argument("--steps", type=int, default=16, help="decode steps after it")
    parser.add_argument("--limit-gib", type=float, default=LIMIT_GIB, help="limit of the peak resident memory")
    parser.add_argument("--engines", default=",".join(ENGINES), help=f"of {', '.join(ENGINES)}")
    parser.add_argument("--policies", default=",".join(POLICIES), help="names of conf/kv/")
    parser.add_argument("--one", nargs=2, metavar=("ENGINE", "POLICY"), help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.one:
        print(json.dumps(run_one(arguments.one[0], arguments.one[1], arguments.tokens, arguments.steps)))
        return 0
    results = []
    for engine in arguments.engines.split(","):
        for policy in arguments.policies.split(","):
            result = run_in_subprocess(engine, policy, arguments.tokens, arguments.steps)
            results.append(result | {"within_limit": result["peak_rss_gib"] <= arguments.limit_gib})
            log(
                f"{engine} {policy}: prefill {result['prefill_s']:.1f} s, {arguments.steps} decode steps "
                f"{result['decode_s']:.2f} s, peak {result['peak_rss_gib']:.2f} GiB of {arguments.limit_gib:g}"
            )
    write_json(arguments.json, results_record(results, limit_gib=arguments.limit_gib))
    return 0 if all(result["within_limit"] for result in results) else 3


if __name__ == "__main__":
    sys.exit(main())
