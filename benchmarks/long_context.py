"""32,768 tokens prefilled and then decoded from, on both engines, within 8 GiB.

    python -m benchmarks.long_context --json benchmarks/results/long_context.json

Every engine and policy runs in a process of its own; its peak resident memory is the kernel's figure for that process,
libraries, weights and cache together. Exit code 3 when one of them was above the limit.
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
from benchmarks.recording import ROOT
from pipeline.core.records import Engine
from stages.engines.onnx.engine import load_engine
from stages.engines.oracle.engine import OracleEngine

ENGINES = ("onnx", "oracle")
POLICIES = ("fp16", "fp8k_int4v", "int4_g64")
LIMIT_GIB = 8.0
CALIBRATION_TOKENS = 512


def run_one(engine_name: str, policy_name: str, tokens: int, steps: int) -> dict[str, Any]:
    """Prefill `tokens` tokens and decode `steps` more in this process."""
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
        benchlib.say(f"{engine_name} {policy_name}: prefill of {tokens} tokens")
        clock = time.perf_counter()
        handles, _ = engine.prefill([ids[0, :tokens].tolist()])
        prefilled = time.perf_counter()
        benchlib.say(f"{engine_name} {policy_name}: {prefilled - clock:.1f} s; {steps} decode steps")
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


def in_process_of_its_own(engine: str, policy: str, tokens: int, steps: int) -> dict[str, Any]:
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
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, cwd=ROOT)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def main(arguments_given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--limit-gib", type=float, default=LIMIT_GIB)
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--one", nargs=2, metavar=("ENGINE", "POLICY"), help=argparse.SUPPRESS)
    arguments = parser.parse_args(arguments_given)
    if arguments.one:
        print(json.dumps(run_one(arguments.one[0], arguments.one[1], arguments.tokens, arguments.steps)))
        return 0
    results = []
    for engine in arguments.engines.split(","):
        for policy in arguments.policies.split(","):
            result = in_process_of_its_own(engine, policy, arguments.tokens, arguments.steps)
            results.append(result | {"within_limit": result["peak_rss_gib"] <= arguments.limit_gib})
            benchlib.say(
                f"{engine} {policy}: prefill {result['prefill_s']:.1f} s, {arguments.steps} decode steps "
                f"{result['decode_s']:.2f} s, peak {result['peak_rss_gib']:.2f} GiB of {arguments.limit_gib:g}"
            )
    benchlib.write_json(arguments.json, benchlib.record(results, limit_gib=arguments.limit_gib))
    return 0 if all(result["within_limit"] for result in results) else 3


if __name__ == "__main__":
    sys.exit(main())
