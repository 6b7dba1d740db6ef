"""The cost of eviction on SmolLM2: StreamingLLM's table of sinks, and quality against the share of the tokens kept.

    python -m benchmarks.eviction --json benchmarks/results/eviction_smollm2.json     # 15 minutes of one core

The cache is FP16, so that eviction is the only difference from the baseline. The table of sinks uses kvgate's pages. In the
curve, every method keeps SINKS first tokens and spends half of its budget on the latest tokens. Its rule chooses the other half
from the tokens between them, by layer and head: the latest ones (StreamingLLM), those with the most attention (H2O), or random
ones.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.benchlib import load_model, load_policy, static_scales_on
from benchmarks.documentation import CALIBRATION_TOKENS, MODEL, all_tokens, convert_once
from benchmarks.numerics import Forced, Measured, ScoredText, measure_engines, page_texts, verdict
from benchmarks.recording import results_record, write_json
from stages.checkpoints.places import locate_checkpoint
from stages.engines.reference.engine import TorchEngine
from stages.engines.reference.heavy import HeavyCache
from stages.policies.policy import FP16_POLICY, Eviction, KVPolicy

TEXTS, TOKENS, FIRST = 8, 768, 640
"""Number of texts, tokens per text, and first tokens of a text that are not scored."""
SINK_TABLE, WINDOW = (0, 1, 2, 4, 8, 16, 64), 128
"""Sinks of the table, and its window in tokens."""
SINKS, BUDGETS = 4, (48, 96, 192, 384)
"""Sinks of every method of the curve, and its budgets in tokens: the sixteenth to half of a text."""
EVICTION = Eviction(window_tokens=64, heavy_tokens=64, sink_tokens=SINKS)


class RecentCache(HeavyCache):
    """Keeps the latest tokens: StreamingLLM's cache, by single tokens."""

    @property
    def ranks(self) -> Tensor:
        return self.positions


class RandomCache(HeavyCache):
    """Keeps random tokens."""

    @property
    def ranks(self) -> Tensor:
        drawn = torch.rand(len(self.positions), TOKENS, generator=torch.Generator().manual_seed(0))
        return drawn.gather(1, self.positions)


METHODS: tuple[tuple[str, type[HeavyCache], KVPolicy], ...] = (
    ("StreamingLLM", RecentCache, FP16_POLICY),
    ("H2O", HeavyCache, FP16_POLICY),
    ("random", RandomCache, FP16_POLICY),
    ("H2O, FP8", HeavyCache, load_policy("fp8")),
)

CLAIMS = (
    *(
        (f"sinks: {sinks} are better than {fewer}", f"sinks {sinks}", f"sinks {fewer}")
        for fewer, sinks in ((0, 1), (0, 4), (4, 64))
    ),
    *(
        (f"{better} is better than {worse} at {budget} tokens", f"{better} {budget}", f"{worse} {budget}")
        for better, worse in (("H2O", "random"), ("H2O", "StreamingLLM"), ("StreamingLLM", "random"))
        for budget in BUDGETS
    ),
)
"""(claim, row that should have the smaller mean KL, row to compare with)."""


class RankedEngine(TorchEngine):
    """The reference engine with another rule of eviction."""

    cache: type[HeavyCache] = HeavyCache

    def _heavy_caches(self) -> list[HeavyCache]:
        return [self.cache.empty(self.policy, self.shape, storages, self.device) for storages in self.storages]


def engines_of(model: Any, scales: Any) -> dict[str, TorchEngine]:
    """Return an engine for every row of both tables."""
    engines: dict[str, TorchEngine] = {}
    for sinks in SINK_TABLE:
        kv = FP16_POLICY.model_copy(update={"eviction": Eviction(window_tokens=WINDOW, sink_tokens=sinks)})
        engines[f"sinks {sinks}"] = TorchEngine.from_model(model, kv)
    for budget in BUDGETS:
        half = budget // 2
        # Not validated: the caches of single tokens need no whole pages.
        eviction = EVICTION.model_copy(update={"window_tokens": half, "heavy_tokens": budget - half - SINKS})
        for name, cache, base in METHODS:
            kv = base.model_copy(update={"eviction": eviction})
            engine = engines[f"{name} {budget}"] = RankedEngine.from_model(model, kv, scales(kv))
            engine.cache = cache
    return engines


def kept_share(kv: KVPolicy, engine: TorchEngine) -> float:
    """Return the mean share of the earlier tokens that a scored token can read."""
    lengths = range(FIRST, TOKENS - 1)
    return sum(kv.kept_tokens(length, engine.shape) / length for length in lengths) / len(lengths)


def show(measured: dict[str, Measured], shares: dict[str, float], texts: Sequence[ScoredText]) -> None:
    """Print both tables and the verdicts on the claims."""
    print(f"| sinks, with a window of {WINDOW} | tokens kept | mean KL | PPL ratio |\n|---:|---:|---:|---:|")
    for sinks in SINK_TABLE:
        result = measured[f"sinks {sinks}"]
        print(f"| {sinks} | {shares[f'sinks {sinks}']:.0%} | {result.mean_kl:.3f} | {result.perplexity_ratio:.3f} |")
    names = [name for name, *_ in METHODS]
    print(f"\n| tokens kept | {' | '.join(f'{name}: mean KL | PPL ratio' for name in names)} |")
    print(f"|---:|{'---:|---:|' * len(names)}")
    for budget in BUDGETS:
        rows = [measured[f"{name} {budget}"] for name in names]
        cells = " | ".join(f"{result.mean_kl:.3f} | {result.perplexity_ratio:.3f}" for result in rows)
        print(f"| {budget} ({shares[f'H2O {budget}']:.0%}) | {cells} |")
    print("\n| claim | times the KL | verdict |\n|---|---:|---|")
    documents = [text.document for text in texts]
    for claim, better, worse in CLAIMS:
        print(f"| {claim} | {verdict(measured[better], measured[worse], documents)} |")


def main(command_line: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("work/numerics"), help="where the GGUF is converted")
    parser.add_argument("--texts", type=int, default=TEXTS)
    parser.add_argument("--json", type=Path, help="results file")
    arguments = parser.parse_args(command_line)
    torch.set_num_threads(1)
    arguments.work.mkdir(parents=True, exist_ok=True)
    checkpoint = convert_once(locate_checkpoint(MODEL), arguments.work / "smollm2")
    tokens, model = all_tokens(checkpoint), load_model(checkpoint)
    scales = static_scales_on(checkpoint, tokens[-CALIBRATION_TOKENS:].reshape(-1, 512).tolist())
    texts = page_texts(tokens, arguments.texts, TOKENS, FIRST)
    engines = engines_of(model, scales)
    exact: Forced = TorchEngine.from_model(model, FP16_POLICY)
    sums = measure_engines(exact, engines, texts)
    measured = {name: Measured(engine.policy.bytes_per_token(engine.shape), sums[name]) for name, engine in engines.items()}
    shares = {name: kept_share(engine.policy, engine) for name, engine in engines.items()}
    show(measured, shares, texts)
    results = [
        {"row": name, "kept": round(shares[name], 4), "mean_kl": result.mean_kl, "ppl_ratio": result.perplexity_ratio}
        for name, result in measured.items()
    ]
    write_json(arguments.json, results_record(results, ("torch", "transformers", "numpy"), texts=len(texts), tokens=TOKENS))


if __name__ == "__main__":
    main()
