"""llama.cpp's own measure of a cache: what `llama-perplexity --kl-divergence` computes, by its C interface.

    python -m benchmarks.llamacpp_kl --python .venv-llamacpp/bin/python --json benchmarks/results/llamacpp_kl.json

The text is cut into chunks of 512 tokens, the second half of each is scored, and the base is llama.cpp's own f16 cache: the
tool's definition (tools/perplexity/perplexity.cpp), which the Python package does not carry. KL and probabilities are of
float32 logits, where the tool keeps 16 bits of the base; and of the decode way of attention (the engine feeds 32 at once).
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.benchlib import load_policy
from benchmarks.documentation import MODEL, all_tokens, converted
from benchmarks.recording import log, results_record, write_json
from pipeline.checkpoint.description import inspect_checkpoint
from pipeline.checkpoint.places import locate_checkpoint
from pipeline.core.kv import KVPolicy
from pipeline.core.records import no_progress
from pipeline.core.scales import KVScales
from stages.engines.base import Logits
from stages.engines.llamacpp.build import build_bundle
from stages.engines.llamacpp.config import LlamaCppConfig
from stages.engines.llamacpp.engine import LlamaCppEngine
from stages.evaluate.distances.distance import kl_of_logits, log_softmax

CHUNK = 512
"""The tool's context; its second half is scored."""


def unrotated(policy: KVPolicy) -> KVPolicy:
    """Return a policy as llama.cpp computes it with LLAMA_ATTN_ROT_DISABLE=1."""
    plain = {side: form.model_copy(update={"rotation": "none"}) for side, form in policy.formats}
    return policy.model_copy(update={"name": f"{policy.name}_unrotated", **plain})


def logits(policy: KVPolicy, config: LlamaCppConfig, work: Path, chunks: Sequence[list[int]]) -> list[Logits]:
    """Return the scored logits (CHUNK / 2 - 1, V) of each chunk."""
    bundle, scales = work / policy.name, work / "scales.json"
    if not (bundle / "bundle.json").is_file():
        bundle.mkdir(parents=True)
        layers = inspect_checkpoint(work / "checkpoint").shape.layers
        scales.write_text(KVScales(layers=tuple({} for _ in range(layers))).model_dump_json())
        gguf = locate_checkpoint(MODEL)
        build_bundle(work / "checkpoint", bundle, config, gguf=gguf, policy=policy, scales=scales, progress=no_progress)
    engine = LlamaCppEngine(bundle, config)
    rows = engine.forced_together([(chunk, CHUNK // 2) for chunk in chunks])
    engine.close()
    return [part[:-1] for part in rows]


def compare(bases: Sequence[Logits], others: Sequence[Logits], chunks: Sequence[list[int]]) -> dict[str, float]:
    """Return the tool's figures: the KL, the likeliest tokens that agree, and the change of the known token's probability."""
    parts = []
    for base, other, chunk in zip(bases, others, chunks, strict=True):
        known = np.arange(len(base)), chunk[CHUNK // 2 + 1 :]
        before, after = log_softmax(base)[known], log_softmax(other)[known]
        parts.append((kl_of_logits(base, other), before, after, base.argmax(-1) == other.argmax(-1)))
    kl, before, after, same = map(np.concatenate, zip(*parts, strict=True))
    return {
        "tokens": kl.size,
        "mean_kl": float(kl.mean()),
        "median_kl": float(np.median(kl)),
        "p99_kl": float(np.quantile(kl, 0.99)),
        "max_kl": float(kl.max()),
        "same_top": float(same.mean()),
        "rms_change_of_probability": float(np.sqrt(((np.exp(after) - np.exp(before)) ** 2).mean())),
        "perplexity_ratio": float(np.exp((before - after).mean())),
    }


def main(command_line: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="llama.cpp's interpreter")
    parser.add_argument("--chunks", type=int, default=8, help="chunks of 512 tokens of Python's documentation")
    parser.add_argument("--work", type=Path, default=Path("work/llamacpp_kl"))
    parser.add_argument("--json", type=Path, help="the results file")
    arguments = parser.parse_args(command_line)
    arguments.work.mkdir(parents=True, exist_ok=True)
    checkpoint = converted(locate_checkpoint(MODEL), arguments.work / "checkpoint")
    ids: list[int] = all_tokens(checkpoint)[: arguments.chunks * CHUNK].tolist()
    chunks = [ids[begin : begin + CHUNK] for begin in range(0, len(ids), CHUNK)]
    config = LlamaCppConfig(
        name="llamacpp", python=arguments.python, request_timeout_s=1800, threads=1, flash_attn=True,
        n_ctx=CHUNK + 8, n_seq_max=4, n_batch=CHUNK,
    )  # fmt: skip
    named = [load_policy(name) for name in ("llamacpp_q8k_q4v", "llamacpp_q8_0", "llamacpp_q4_0")]
    base, rows = logits(load_policy("fp16"), config, arguments.work, chunks), []
    for policy in (*named, *map(unrotated, named)):
        rows.append({"kv": policy.name, **compare(base, logits(policy, config, arguments.work, chunks), chunks)})
        log(str(rows[-1]))
    write_json(arguments.json, results_record(rows, ("numpy", "gguf")))


if __name__ == "__main__":
    main()
