"""Wrong FAILs of the stress test: sound caches of the tiny model on every CPU engine, with several seeds.

python -m benchmarks.stress_table --match int8 --json benchmarks/results/stress_cpu.json    # adds the matching policies
"""

import argparse
import json
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from benchmarks.benchlib import CHECKPOINT, load_model, load_policy, make_bundle, static_scales_on, story_tokens
from benchmarks.recording import ROOT, checkout, log, results_record, write_json
from stages.core.records import no_progress
from stages.engines.backend import ROUNDING
from stages.engines.onnx.engine import load_engine
from stages.engines.reference.engine import TorchEngine
from stages.evaluate.conformance.comparer import ReferenceEngine
from stages.evaluate.conformance.stress_test import run_stress_test
from stages.policies.policy import KVPolicy
from stages.workloads.config import StressTestConfig

CONFIG = StressTestConfig(max_tokens=448, decode_steps=24, offset_steps=4, max_batch=10, requests=16)
BATCH, CLAIMED = 8, 400
Kind = Literal["native", "graph", "reference"]
TOO_WIDE = {"int4_g128"}
"""Policies with groups wider than a head of the tiny model."""


def engines(policy: KVPolicy) -> tuple[Kind, ...]:
    """Return the engines that compute a policy on a CPU."""
    only_reference = any(form.code.reference_only for _, form in policy.formats)
    return ("reference",) if only_reference else ("native", "graph", "reference")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--match", default="", help="regular expression that a policy's name begins with")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", type=Path, required=True, help="results file; rows of other policies are kept")
    options = parser.parse_args()

    names = [path.stem for path in sorted((ROOT / "conf" / "kv").glob("*.yaml")) if re.match(options.match, path.stem)]
    existing = json.loads(options.json.read_text())["results"] if options.json.exists() else []
    rows = {(row["policy"], row["engine"]): row for row in existing}
    texts = story_tokens(8, 512).tolist()
    model, scales_of = load_model(), static_scales_on(CHECKPOINT, texts)
    for name in [name for name in names if name not in TOO_WIDE]:
        policy = load_policy(name)
        scales = scales_of(policy)
        for kind in engines(policy):
            with TemporaryDirectory() as work:
                failures: list[str] = []
                for seed in range(options.seeds):
                    engine: Any = TorchEngine.from_model(model, policy, scales)
                    replayed = TorchEngine.from_model(model, policy, scales)
                    reference = ReferenceEngine(replayed, None if replayed.rounds_queries else ROUNDING["float32"])
                    if kind != "reference":
                        bundle = Path(work) / name
                        bundle = bundle if bundle.exists() else make_bundle(policy, scales, Path(work))
                        engine = load_engine(bundle, threads=1, attention=kind)
                    config = CONFIG.model_copy(update={"seed": seed})
                    result = run_stress_test(engine, reference, config, BATCH, CLAIMED, no_progress, texts=texts)
                    failures += [f"seed {seed}: {failure}" for failure in result.failures[:1]]
            rows[name, kind] = {
                **{"policy": name, "engine": kind, "seeds": options.seeds, "failures": failures},
                "commit": checkout(),
            }
            log(f"{name} {kind}: {len(failures)} of {options.seeds} fail {failures[:1]}")
            write_json(options.json, results_record([rows[key] for key in sorted(rows)]))
    runs, wrong = sum(row["seeds"] for row in rows.values()), sum(len(row["failures"]) for row in rows.values())
    print(f"{len({row['policy'] for row in rows.values()})} policies, {runs} runs, {wrong} wrong FAILs")


if __name__ == "__main__":
    main()
