"""vLLM's FP8 cache on a CPU beside the oracle that rounds to nearest, and the one that rounds towards zero.

    python -m benchmarks.vllm_cpu_fp8 --python .venv-vllm/bin/python --json benchmarks/results/vllm_cpu_fp8.json

SmolLM2-135M-Instruct reads pages of Python's documentation: a prompt of `--prompt` tokens, then `--decoded` known ones, forced
through the decode path. vLLM runs in bfloat16 with each of its types of cache, at scale 1.0; the oracle runs in float32 and
reads every token from its cache, as vLLM does. Then vLLM's own operator writes random keys and values, and its codes are
compared with those of torch's rounding.
"""

import argparse
import json
import math
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from benchmarks.documentation import MODEL, Tokens, all_tokens, converted, starts
from benchmarks.recording import ROOT, log, results_record, write_json
from pipeline.checkpoint.description import inspect_checkpoint
from pipeline.checkpoint.places import locate_checkpoint
from pipeline.core.kv import FP16_POLICY, KVPolicy, KVShape
from pipeline.core.scales import KVScales
from stages.checkpoints import load_causal_lm
from stages.engines.base import Logits
from stages.engines.oracle.cache import LayerStorage
from stages.engines.oracle.engine import OracleEngine
from stages.engines.oracle.relatives import TowardsZero
from stages.engines.vllm.backend import VllmBackend
from stages.engines.vllm.config import VllmConfig
from stages.engines.vllm.engine import VllmEngine, load_engine
from stages.evaluate.distances.distance import kl_of_rows

POLICIES = ("fp16", "fp8_uncalibrated", "fp8_e5m2")
CODES = Path(__file__).with_name("kvgate_vllm_codes.py")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vllm_cpu_fp8", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--python", default=os.environ.get("KVGATE_VLLM_PYTHON", ".venv-vllm/bin/python"))
    parser.add_argument("--texts", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--decoded", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--work", type=Path, default=Path("work/vllm_cpu_fp8"))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    torch.set_num_threads(given.threads)
    given.work.mkdir(parents=True, exist_ok=True)
    checkpoint = converted(locate_checkpoint(MODEL), given.work / "checkpoint")
    texts = _texts(checkpoint, given.texts, given.prompt + given.decoded)
    engines = {kv: _vllm(given, checkpoint, kv, texts) for kv in POLICIES}
    oracles = _oracles(checkpoint, texts, given.prompt)
    rows = [_row(name, *found) for name, found in _compared(engines, oracles, texts, given.prompt)]
    codes = _codes(given.python)
    print(_table(rows, codes))
    record = results_record(
        rows, ("torch", "transformers", "numpy"), model=MODEL, texts=given.texts, prompt=given.prompt, decoded=given.decoded,
        vllm=codes["release"], codes=codes["cases"],
    )  # fmt: skip
    write_json(given.json, record)


def _texts(checkpoint: Path, count: int, length: int) -> list[list[int]]:
    tokens: Tokens = all_tokens(checkpoint)
    return [tokens[at : at + length].tolist() for at in starts(len(tokens), [length] * count)]


def _policy(kv: str) -> KVPolicy:
    return KVPolicy.model_validate(yaml.safe_load((ROOT / "conf" / "kv" / f"{kv}.yaml").read_text(encoding="utf-8")))


def _ones(policy: KVPolicy, shape: KVShape) -> KVScales:
    """Scales of 1.0 wherever the policy is static."""
    sides = {side: {"scale": [1.0]} for side, form in policy.formats if form.static}
    return KVScales.model_validate_json(json.dumps({"layers": [sides] * shape.layers}))


def _vllm(given: argparse.Namespace, checkpoint: Path, kv: str, texts: Sequence[Sequence[int]]) -> list[Logits]:
    """Return vLLM's logits of every text's decoded tokens."""
    shipped = yaml.safe_load((ROOT / "conf" / "backend" / "vllm.yaml").read_text(encoding="utf-8"))
    config = VllmConfig.model_validate(
        {**shipped, "python": given.python, "threads": given.threads, "max_model_len": 2048, "kv_cache_gib": 0.5}
    )
    policy, bundle = _policy(kv), given.work / f"bundle-{kv}"
    if not (bundle / "bundle.json").is_file():
        bundle.mkdir(exist_ok=True)
        scales = given.work / f"{kv}.json"
        scales.write_text(_ones(policy, inspect_checkpoint(checkpoint).shape).model_dump_json(), encoding="utf-8")
        VllmBackend(config).build(checkpoint, bundle, policy=policy, scales=scales, progress=lambda *_: None)
    log(f"vLLM: {kv}")
    engine: VllmEngine = load_engine(bundle, config)
    rows = engine.forced_together([(text, given.prompt) for text in texts])
    engine.close()
    return rows


def _oracles(checkpoint: Path, texts: Sequence[Sequence[int]], prompt: int) -> dict[tuple[str, str], list[Logits]]:
    """Return the oracle's logits by policy and rounding."""
    model = load_causal_lm(checkpoint, dtype=torch.float32)
    found = {}
    for kv in POLICIES:
        policy = _policy(kv)
        shape = OracleEngine.from_model(model, FP16_POLICY).shape
        nearest = OracleEngine.from_model(model, policy, _ones(policy, shape))
        for rounding in ("nearest",) if policy.key.exact else ("nearest", "towards zero"):
            log(f"oracle: {kv}, {rounding}")
            storages: list[LayerStorage] = nearest.storages
            if rounding == "towards zero":
                storages = [{side: TowardsZero(s.form, s.static) for side, s in layer.items()} for layer in storages]
            oracle = OracleEngine(model, policy, shape, storages, nearest.prefill_chunk)
            oracle.reads_itself = True
            found[kv, rounding] = [oracle.forced(text, prompt) for text in texts]
    return found


def _compared(
    engines: dict[str, list[Logits]],
    oracles: dict[tuple[str, str], list[Logits]],
    texts: Sequence[Sequence[int]],
    prompt: int,
) -> list[tuple[str, tuple[Any, ...]]]:
    """Return, for each contender, its NLL beside that of its own 16-bit cache, and vLLM's KL from it."""
    found: list[tuple[str, tuple[Any, ...]]] = []
    for kv in POLICIES:
        found.append((f"vLLM {kv}", (_nll(engines[kv], texts, prompt), _nll(engines["fp16"], texts, prompt), None)))
        for (policy, rounding), rows in oracles.items():
            if policy == kv:
                base = _nll(oracles["fp16", "nearest"], texts, prompt)
                found.append((f"oracle {kv}, {rounding}", (_nll(rows, texts, prompt), base, _kl(rows, engines[kv]))))
    return found


def _row(name: str, nll: float, base: float, kl: float | None) -> dict[str, Any]:
    return {"contender": name, "nll": nll, "ppl_ratio": math.exp(nll - base), "kl_to_vllm": kl}


def _nll(rows: Sequence[Logits], texts: Sequence[Sequence[int]], prompt: int) -> float:
    """Mean negative log-likelihood of the tokens after each decoded one, nats."""
    losses = []
    for logits, text in zip(rows, texts, strict=True):
        predicted = torch.from_numpy(logits[:-1]).double().log_softmax(-1)
        losses.append(-predicted.gather(-1, torch.tensor(text[prompt + 1 :])[:, None]).squeeze(-1))
    return float(torch.cat(losses).mean())


def _kl(rows: Sequence[Logits], engine: Sequence[Logits]) -> float:
    """Mean KL(oracle || vLLM) over all decoded tokens, nats."""
    values = [kl_of_rows(a, b[None])[0] for x, y in zip(rows, engine, strict=True) for a, b in zip(x, y, strict=True)]
    return float(np.mean(values))


def _codes(python: str) -> dict[str, Any]:
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run([python, str(CODES)], check=True, capture_output=True, text=True, env=environment)
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def _table(rows: Sequence[dict[str, Any]], codes: dict[str, Any]) -> str:
    lines = ["| contender | NLL | PPL ratio | KL(it, vLLM) |", "|---|---|---|---|"]
    for row in rows:
        kl = "" if row["kl_to_vllm"] is None else f"{row['kl_to_vllm']:.2e}"
        lines.append(f"| {row['contender']} | {row['nll']:.4f} | {row['ppl_ratio']:.4f} | {kl} |")
    lines += [
        "",
        f"| vLLM {codes['release']} | activations | scale | side | codes | nearest | towards zero |",
        "|---|---|---|---|---|---|---|",
    ]
    for case in codes["cases"]:
        for side in ("keys", "values"):
            found = case[side]
            counted = f"{found['codes']} | {found['nearest']} | {found['towards_zero']}"
            lines.append(f"| {case['cache']} | {case['activations']} | {case['scale']} | {side} | {counted} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
