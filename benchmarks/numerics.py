"""The cost of the formats of keys and values by policy, and a test of the literature's claims on three models.

    python -m benchmarks.numerics tiny smollm2 gemma3       # prints the figures of docs/numerics.md
    python -m benchmarks.numerics --peers tiny smollm2      # prints the rows of transformers' QuantizedCache instead

Every policy is measured in the reference engine's forced decode: every scored token reads the quantized cache. The baseline is
the same model over an FP16 cache. The tiny model reads generated text; SmolLM2 and Gemma 3 read pages of Python's
documentation. Gemma 3's large vocabulary takes longer than its layers, so Gemma 3 reads fewer and shorter pages (policies
SHORT), and long texts under only a few policies (LONG).
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from scipy.special import log_softmax

from benchmarks.benchlib import CHECKPOINT, load_model, load_policy, static_scales_on
from benchmarks.documentation import CALIBRATION_TOKENS, GEMMA3, MODEL, all_tokens, convert_once, start_positions
from benchmarks.recording import log
from benchmarks.transformers_cache import bytes_per_token, peers
from stages.checkpoints.places import locate_checkpoint
from stages.engines.interface import Logits
from stages.engines.reference.engine import TorchEngine
from stages.evaluate.distances.distance import kl_of_logits
from stages.evaluate.inputs.tokens import BundleTokenizer, encode
from stages.policies.formats import Format, Granularity, Rotation
from stages.policies.policy import FP16_POLICY, KVPolicy
from stages.policies.scales import KVScales
from stages.verdict.bets import Array, document_sums
from stages.workloads.generated import generate

COUNTS = {"prose": 16, "retrieval": 24, "tool_call": 16, "copy": 24, "multi_turn": 16}
"""Number of samples for the tiny model, by workload."""
MAX_SCORED = 192
"""Maximum scored tokens of generated prose per sample."""
CALIBRATION = 6
"""Number of calibration texts per workload."""
PAGES, PAGE_TOKENS, PAGE_FIRST = 10, 384, 64
"""For SmolLM2: number of pages, tokens per page, and first tokens of a page that are not scored."""
GEMMA_PAGES, GEMMA_TOKENS, LAST = 4, 192, 32
"""For Gemma 3: number of pages, tokens per page, and scored last tokens (few, since a row of logits has 262,144 numbers)."""
LENGTHS = (256, 480, 544, 1024, 2048, 4096, 8192)
"""Lengths of Gemma 3's longer texts; the last LAST tokens are scored. Gemma 3's windows have 512 tokens."""

EXACT = Format(dtype="fp16")
NVFP4 = load_policy("nvfp4").key


def dynamic(dtype: str, group: int | None = None, symmetric: bool = True, rotation: Rotation = "none") -> Format:
    """Return a format with dynamic scales per token and head, or per `group` channels."""
    granularity: Granularity = "per_token" if group is None else "per_group"
    return Format(
        dtype=dtype, granularity=granularity, group_size=group, symmetric=symmetric, scale="dynamic", rotation=rotation
    )


def static(dtype: str, granularity: Granularity = "per_tensor", **fields: Any) -> Format:
    """Return a format with calibrated, static scales."""
    return Format(dtype=dtype, granularity=granularity, scale="calibrated", **fields)


def policy(key: Format, value: Format | None = None, sinks: int = 0, recent: int = 0) -> KVPolicy:
    """Return a policy for a format of keys and a format of values, which defaults to the keys' format."""
    return KVPolicy(name="measured", key=key, value=value or key, sink_tokens=sinks, recent_tokens=recent)


FP8, INT4 = static("fp8_e4m3"), dynamic("int4")
TURBOQUANT = dynamic("int4", symmetric=False).model_copy(update={"arithmetic": "vllm_turboquant"})
TOKEN_HEAD = TURBOQUANT.model_copy(update={"rotation": "signed_hadamard", "arithmetic": "vllm_token_head"})

POLICIES: dict[str, KVPolicy] = {
    "fp8 per token": policy(dynamic("fp8_e4m3")),
    "fp8 per tensor": policy(FP8),
    "fp8 per head": policy(static("fp8_e4m3", "per_head")),
    "fp8 at scale 1": policy(FP8.model_copy(update={"scale": "uncalibrated"})),
    "fp8 e5m2": policy(static("fp8_e5m2")),
    "int8 per token": policy(dynamic("int8")),
    "int8 per token, rotated": policy(dynamic("int8", rotation="hadamard")),
    "int8 per token, asymmetric": policy(dynamic("int8", symmetric=False)),
    "int8 per tensor": policy(static("int8")),
    "int4 g16": policy(dynamic("int4", 16)),
    "int4 g32": policy(dynamic("int4", 32)),
    "int4 g32, rotated": policy(dynamic("int4", 32, rotation="hadamard")),
    "int4 g32, asymmetric": policy(dynamic("int4", 32, symmetric=False)),
    "int4 per token": policy(INT4),
    "int4 per token, rotated": policy(dynamic("int4", rotation="hadamard")),
    "int4 per token, asymmetric": policy(dynamic("int4", symmetric=False)),
    "int4 per token, asymmetric, rotated": policy(dynamic("int4", symmetric=False, rotation="hadamard")),
    "int4 per tensor": policy(static("int4")),
    "int4 per tensor, asymmetric": policy(static("int4", symmetric=False)),
    "int4, 4 sinks exact": policy(INT4, sinks=4),
    "int4, 16 recent exact": policy(INT4, recent=16),
    "int4, 64 recent exact": policy(INT4, recent=64),
    "int4 keys": policy(INT4, EXACT),
    "int4 values": policy(EXACT, INT4),
    "int4 keys per channel": policy(static("int4", "per_channel"), EXACT),
    "int4 values per channel": policy(EXACT, static("int4", "per_channel")),
    "int8 keys": policy(dynamic("int8"), EXACT),
    "int8 values": policy(EXACT, dynamic("int8")),
    "fp8 keys": policy(dynamic("fp8_e4m3"), EXACT),
    "fp8 values": policy(EXACT, dynamic("fp8_e4m3")),
    "fp8 keys, int4 g64 values": policy(FP8, dynamic("int4", 64)),
    "fp8 keys, int4 g32 values": policy(FP8, dynamic("int4", 32)),
    "nvfp4": policy(NVFP4),
    "nvfp4, rotated": policy(NVFP4.model_copy(update={"rotation": "hadamard"})),
    "fp8 keys, nvfp4 values": policy(FP8, NVFP4),
    "vllm turboquant_k8v4": policy(FP8.model_copy(update={"scale": "uncalibrated"}), TURBOQUANT),
    "vllm int4_per_token_head": policy(TOKEN_HEAD),
}

SHORT = (
    "fp8 per token",
    "fp8 per tensor",
    "fp8 at scale 1",
    "int8 per token",
    "int4 g32",
    "int4 g32, rotated",
    "int4 g32, asymmetric",
    "int4 per token",
    "int4 keys",
    "int4 values",
    "int8 keys",
    "int8 values",
    "fp8 keys",
    "fp8 values",
    "int4 keys per channel",
    "fp8 keys, int4 g64 values",
    "nvfp4",
)
"""Policies for Gemma 3."""
LONG = ("fp8 per tensor", "int8 per token", "fp8 keys, int4 g64 values", "int4 g32")
"""Policies for Gemma 3's longer texts: the policies that `make real MODEL=gemma3` judges."""

COMPARED: dict[str, KVPolicy] = {name: POLICIES[name] for name in ("int4 g32, asymmetric", "int4, 64 recent exact")}
COMPARED["int4, asymmetric, 64 recent exact"] = policy(dynamic("int4", symmetric=False), recent=64)
"""Policies that `--peers` compares with transformers' caches."""
PEER_TEXTS = 4
"""Number of texts of `--peers`, few because a peer decodes token by token."""

CLAIMS: tuple[tuple[str, str, str], ...] = (
    ("fp8 per token is better than int8 per token", "fp8 per token", "int8 per token"),
    ("int8: a scale per token is better than one per tensor", "int8 per token", "int8 per tensor"),
    ("int8 per tensor is better than int4 g32", "int8 per tensor", "int4 g32"),
    ("int4 g32 is better than int4 per token", "int4 g32", "int4 per token"),
    ("int4: a scale per token is better than one per tensor", "int4 per token", "int4 per tensor"),
    ("int4 g16 is better than int4 g32", "int4 g16", "int4 g32"),
    ("fp8: a scale per token is better than one per tensor", "fp8 per token", "fp8 per tensor"),
    ("fp8: a scale per head is better than one per tensor", "fp8 per head", "fp8 per tensor"),
    ("fp8: a calibrated scale is better than scale 1", "fp8 per tensor", "fp8 at scale 1"),
    ("E4M3 is better than E5M2", "fp8 per tensor", "fp8 e5m2"),
    ("int4: keys are more sensitive than values", "int4 values", "int4 keys"),
    ("int8: keys are more sensitive than values", "int8 values", "int8 keys"),
    ("fp8: keys are more sensitive than values", "fp8 values", "fp8 keys"),
    ("int4 keys: scales per channel are better than per token (KIVI)", "int4 keys per channel", "int4 keys"),
    ("int4 values: scales per token are better than per channel (KIVI)", "int4 values", "int4 values per channel"),
    ("FP8 is better than FP8 keys with INT4 values", "fp8 per tensor", "fp8 keys, int4 g64 values"),
    ("FP8 keys with INT4 values are better than INT4 on both", "fp8 keys, int4 g64 values", "int4 per token"),
    ("int4: 4 exact sinks are better than none", "int4, 4 sinks exact", "int4 per token"),
    ("int4: 16 recent tokens exact are better than none", "int4, 16 recent exact", "int4 per token"),
    ("int4: 64 recent tokens exact are better than 16", "int4, 64 recent exact", "int4, 16 recent exact"),
    ("int4: a Hadamard rotation helps", "int4 per token, rotated", "int4 per token"),
    ("int8: a Hadamard rotation helps", "int8 per token, rotated", "int8 per token"),
    ("int4 per token: a zero point helps", "int4 per token, asymmetric", "int4 per token"),
    ("int4 g32: a zero point helps", "int4 g32, asymmetric", "int4 g32"),
    ("int4 per tensor: a zero point helps", "int4 per tensor, asymmetric", "int4 per tensor"),
    ("int8 per token: a zero point helps", "int8 per token, asymmetric", "int8 per token"),
    ("int4 at the same bytes: a zero per token is better than groups of 32", "int4 per token, asymmetric", "int4 g32"),
    ("NVFP4: a Hadamard rotation helps", "nvfp4, rotated", "nvfp4"),
    ("NVFP4 is better than INT4 g32, at the same bytes", "nvfp4", "int4 g32"),
    ("with FP8 keys, NVFP4 values are better than INT4 g32 values", "fp8 keys, nvfp4 values", "fp8 keys, int4 g32 values"),
    ("with FP8 keys, INT4 g32 values are better than turboquant_k8v4", "fp8 keys, int4 g32 values", "vllm turboquant_k8v4"),
    ("rotated INT4 g32 is better than int4_per_token_head", "int4 g32, rotated", "vllm int4_per_token_head"),
    (
        "a float16 zero is better than the whole one of int4_per_token_head",
        "int4 per token, asymmetric, rotated",
        "vllm int4_per_token_head",
    ),
)
"""(claim, policy that should have the smaller mean KL, policy to compare with)."""


@dataclass(frozen=True)
class ScoredText:
    """Token ids and targets. Tokens from `first` on are fed one by one, and `targets` are the tokens that follow them."""

    document: str
    tokens: tuple[int, ...]
    first: int
    targets: tuple[int, ...]


def tiny_texts(counts: Mapping[str, int] = COUNTS) -> list[ScoredText]:
    """Return samples for the tiny model. The prompt's last token is decoded, so that every scored logit reads the cache."""
    samples = [sample for workload, count in counts.items() for sample in generate(workload, count, 0)]
    return [
        ScoredText(item.sample.cluster, (*item.prompt, *item.reference[:-1]), len(item.prompt) - 1, item.reference)
        for item in encode(samples, BundleTokenizer(CHECKPOINT), MAX_SCORED)
    ]


def tiny_calibration() -> list[tuple[int, ...]]:
    """Return token ids of prompts and answers from the calibration split."""
    tokenizer = BundleTokenizer(CHECKPOINT)
    samples = [sample for workload in COUNTS for sample in generate(workload, CALIBRATION, 0, "calibration")]
    return [(*tokenizer.prompt_ids(sample), *tokenizer.text_ids(sample.reference)) for sample in samples]


def page_texts(tokens: npt.NDArray[np.int64], pages: int, length: int, first: int = PAGE_FIRST) -> list[ScoredText]:
    """Return `pages` pages of Python's documentation; tokens from `first` on are scored."""
    texts = [tokens[at : at + length].tolist() for at in start_positions(len(tokens), [length] * pages)]
    return [ScoredText(f"page {i}", tuple(page[:-1]), first, tuple(page[first + 1 :])) for i, page in enumerate(texts)]


@dataclass(frozen=True)
class Measured:
    """The cost of one policy on one model."""

    bytes_per_token: int
    """Bytes of the cache per token, for all layers."""
    sums: Array
    """Sums (texts, 3): KL in nats, increase of the negative log-likelihood in nats, and number of scored tokens."""

    @property
    def mean_kl(self) -> float:
        return float(self.sums[:, 0].sum() / self.sums[:, 2].sum())

    @property
    def perplexity_ratio(self) -> float:
        return float(np.exp(self.sums[:, 1].sum() / self.sums[:, 2].sum()))


def measure(
    model: Any, texts: Sequence[ScoredText], scales: Callable[[KVPolicy], KVScales], policies: Mapping[str, KVPolicy] = POLICIES
) -> dict[str, Measured]:
    """Score all texts under every policy."""
    engines = {name: TorchEngine.from_model(model, kv, scales(kv)) for name, kv in policies.items()}
    exact = TorchEngine.from_model(model, FP16_POLICY)
    sums = measure_engines(exact, engines, texts)
    return {name: Measured(kv.bytes_per_token(exact.shape), sums[name]) for name, kv in policies.items()}


class Forced(Protocol):
    """An engine that decodes known tokens."""

    def forced(self, tokens: Sequence[int], first: int) -> Logits:
        """Prefill the tokens before `first`, decode the others one by one, and return the logits of each decoded token."""
        ...


def measure_engines(exact: Forced, engines: Mapping[str, Forced], texts: Sequence[ScoredText]) -> dict[str, Array]:
    """Return the sums of `Measured` by engine, relative to the engine `exact`."""
    sums = {name: np.zeros((len(texts), 3)) for name in engines}
    for number, text in enumerate(texts):
        baseline = exact.forced(text.tokens, text.first)
        before = _log_likelihood(baseline, text.targets)
        for name, engine in engines.items():
            logits = engine.forced(text.tokens, text.first)
            rise = before - _log_likelihood(logits, text.targets)
            sums[name][number] = kl_of_logits(baseline, logits).sum(), rise, len(text.targets)
        log(f"text {number + 1} of {len(texts)}")
    return sums


def measure_peers(checkpoint: Path, texts: Sequence[ScoredText]) -> dict[str, Measured]:
    """Score all texts under transformers' QuantizedCache, and under policies of kvgate with dynamic scales."""
    model = load_model(checkpoint)
    exact = TorchEngine.from_model(model, FP16_POLICY)
    own = {name: TorchEngine.from_model(model, kv) for name, kv in COMPARED.items()}
    sums = measure_engines(exact, {**own, **peers(load_model(checkpoint))}, texts)
    sizes = {name: kv.bytes_per_token(exact.shape) for name, kv in COMPARED.items()}
    return {name: Measured(sizes.get(name, bytes_per_token(exact.shape)), sums[name]) for name in sums}


def _log_likelihood(logits: npt.NDArray[np.float32], targets: Sequence[int]) -> float:
    return float(log_softmax(logits.astype(np.float64), axis=1)[np.arange(len(targets)), targets].sum())


REPLICATES, SEED = 2000, 20_260_101
"""Draws of the bootstrap, and their fixed seed."""


def resampled_sums(sums: Array, documents: Sequence[str]) -> Array:
    """Bootstrap the rows of `sums` by document: (rows, columns) -> column sums of every draw, (REPLICATES, columns)."""
    by_document = np.stack(document_sums(documents, *sums.T), axis=1)
    drawn = np.random.default_rng(SEED).integers(len(by_document), size=(REPLICATES, len(by_document)))
    return np.asarray(by_document[drawn].sum(axis=1))


def verdict(better: Measured, worse: Measured, documents: Sequence[str]) -> str:
    """Return the ratio of mean KL of `worse` to `better`, its 95 % interval over documents, and a verdict, as text."""
    sums = np.stack([worse.sums[:, 0], better.sums[:, 0]], axis=1)
    drawn, ratio = resampled_sums(sums, documents), worse.mean_kl / better.mean_kl
    low, high = np.percentile(drawn[:, 0] / drawn[:, 1], [2.5, 97.5])
    word = "HOLDS" if low > 1 else "DOES NOT HOLD" if high < 1 else "UNDECIDED"
    return f"{ratio:.3g}x [{low:.3g}, {high:.3g}] | {word}"


def show(measured: Mapping[str, Measured], texts: Sequence[ScoredText]) -> None:
    """Print the cost of every policy, and the verdict on every claim."""
    print("| policy | bytes/token | mean KL | PPL ratio |\n|---|---:|---:|---:|")
    for name, result in measured.items():
        print(f"| {name} | {result.bytes_per_token:,} | {result.mean_kl:.1e} | {result.perplexity_ratio:.4f} |")
    print("\n| claim | times the KL | verdict |\n|---|---:|---|")
    documents = [text.document for text in texts]
    for statement, better, worse in CLAIMS:
        if {better, worse} <= measured.keys():
            print(f"| {statement} | {verdict(measured[better], measured[worse], documents)} |")


def show_lengths(model: Any, tokens: npt.NDArray[np.int64], scales: Callable[[KVPolicy], KVScales]) -> None:
    """Print the mean KL of the last tokens, by length of the text."""
    print(f"\n| tokens | {' | '.join(LONG)} |\n|---:|{'---:|' * len(LONG)}")
    for length in LENGTHS:
        texts = page_texts(tokens, 1, length, length - LAST - 1)
        measured = measure(model, texts, scales, {name: POLICIES[name] for name in LONG})
        print(f"| {length:,} | {' | '.join(f'{result.mean_kl:.1e}' for result in measured.values())} |", flush=True)


def main(command_line: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", choices=("tiny", "smollm2", "gemma3"), help="4, 15, 10 minutes")
    parser.add_argument("--peers", action="store_true", help="measure transformers' QuantizedCache instead (5 minutes)")
    parser.add_argument("--work", type=Path, default=Path("work/numerics"), help="where GGUFs are converted to")
    arguments = parser.parse_args(command_line)
    torch.set_num_threads(1)
    for name in arguments.models:
        print(f"\n## {name}")
        if name == "tiny":
            texts = tiny_texts()
            if arguments.peers:
                texts = texts[:: len(texts) // PEER_TEXTS]
                show(measure_peers(CHECKPOINT, texts), texts)
                continue
            show(measure(load_model(), texts, static_scales_on(CHECKPOINT, tiny_calibration())), texts)
            continue
        arguments.work.mkdir(parents=True, exist_ok=True)
        checkpoint = convert_once(locate_checkpoint(MODEL if name == "smollm2" else GEMMA3), arguments.work / name)
        tokens = all_tokens(checkpoint)
        if arguments.peers:
            texts = page_texts(tokens, PEER_TEXTS, PAGE_TOKENS)
            show(measure_peers(checkpoint, texts), texts)
            continue
        model = load_model(checkpoint)
        scales = static_scales_on(checkpoint, tokens[-CALIBRATION_TOKENS:].reshape(-1, 512).tolist())
        if name == "smollm2":
            texts = page_texts(tokens, PAGES, PAGE_TOKENS)
            show(measure(model, texts, scales), texts)
        else:
            texts = page_texts(tokens, GEMMA_PAGES, GEMMA_TOKENS, GEMMA_TOKENS - LAST - 1)
            show(measure(model, texts, scales, {key: POLICIES[key] for key in SHORT}), texts)
            show_lengths(model, tokens, scales)


if __name__ == "__main__":
    main()
