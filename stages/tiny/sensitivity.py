"""Measures how the checkpoint reacts to KV-cache formats: `python -m stages.tiny.sensitivity [DIR]`.

It fake-quantizes the keys (after RoPE) and values of every layer and all past tokens, while references are forced. The
planted outliers were tuned with it. The engines of the pipeline are measured by `stages.evaluate` instead.

Legend: B = batch, G = KV heads, T = tokens, D = head_dim, N = tokens of the reference, V = vocab_size.
"""

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoTokenizer, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from stages.tiny.scores import CHECKPOINT, force
from stages.workloads import generate

NAME = "kvgate_fake_quantized"
FP8_MAX = 448.0
COUNTS = {"retrieval": 100, "tool_call": 60, "copy": 60, "multi_turn": 60, "prose": 12}
"""Samples by workload."""

Rounding = Callable[[Tensor, float], Tensor]
"""Rounds keys or values x_BGTD, given the calibrated amax of the layer's tensor."""


def exact(x_BGTD: Tensor, _amax: float) -> Tensor:
    """Return the states unrounded."""
    return x_BGTD


def fp8_per_tensor(x_BGTD: Tensor, amax: float) -> Tensor:
    """Round to FP8 (E4M3) with one scale for the layer."""
    scale = amax / FP8_MAX
    codes = (x_BGTD / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return codes.float() * scale


def integer(levels: int, per_tensor: bool = False) -> Rounding:
    """Return the rounding to symmetric codes -levels..levels, with one scale per token and head, or one for the layer."""

    def rounding(x_BGTD: Tensor, amax: float) -> Tensor:
        limit = torch.tensor(amax) if per_tensor else x_BGTD.abs().amax(-1, keepdim=True)
        scale = limit.clamp(min=1e-8) / levels
        return (x_BGTD / scale).round().clamp(-levels, levels) * scale

    return rounding


FORMATS: dict[str, tuple[Rounding, Rounding]] = {
    "fp16": (exact, exact),
    "fp8": (fp8_per_tensor, fp8_per_tensor),
    "int8 per token": (integer(127), integer(127)),
    "fp8 K, int4 V g64": (fp8_per_tensor, integer(7)),
    "int4 V only": (exact, integer(7)),
    "int4 K only": (integer(7), exact),
    "int4 per token": (integer(7), integer(7)),
    "int4 per tensor": (integer(7, per_tensor=True), integer(7, per_tensor=True)),
}
"""Name -> (keys, values). head_dim is 64, so that int4 in groups of 64 is int4 per token and head."""


@dataclass
class FakeQuantizer:
    """An attention function that rounds keys and values before it attends."""

    keys: Rounding = exact
    values: Rounding = exact
    amax: dict[tuple[int, str], float] = field(default_factory=dict)
    """(layer, "key" or "value") -> largest magnitude of the calibration."""
    calibrating: bool = True
    """Whether calls still update `amax`."""

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        if self.calibrating:
            for name, tensor in (("key", key), ("value", value)):
                self.amax[layer, name] = max(self.amax.get((layer, name), 0.0), tensor.abs().max().item())
        key = self.keys(key, self.amax[layer, "key"])
        value = self.values(value, self.amax[layer, "value"])
        output: tuple[Tensor, Tensor | None] = sdpa_attention_forward(module, query, key, value, mask, **kwargs)
        return output


@dataclass(frozen=True)
class Row:
    """One format, compared with the unquantized model."""

    mean_kl: float
    """Mean KL, in nats per token."""
    p99_kl: float
    """99th percentile of the KL, in nats."""
    exact: dict[str, float]
    """Workload -> share of exact answers."""
    flips: int
    """Chat samples that only the unquantized model answers exactly."""
    perplexity: float


def measure(checkpoint: Path, counts: dict[str, int], seed: int = 0) -> dict[str, Row]:
    """Measure every format of FORMATS.

    Args:
        checkpoint: Directory of the tiny model.
        counts: Samples by workload; "prose" must be among them.
        seed: Seed of the samples.

    Returns:
        Name of the format -> its row.
    """
    quantizer = FakeQuantizer()
    AttentionInterface.register(NAME, quantizer)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation=NAME)
    for name in counts:
        for sample in generate(name, 8, seed, "calibration"):
            force(model, tokenizer, sample)
    quantizer.calibrating = False
    samples = [sample for name, count in counts.items() for sample in generate(name, count, seed)]
    unquantized = [force(model, tokenizer, sample) for sample in samples]
    rows = {}
    for name, (quantizer.keys, quantizer.values) in FORMATS.items():
        divergences, flips = [], 0
        answers: dict[str, list[bool]] = {}
        prose_nll = prose_tokens = 0.0
        for sample, reference in zip(samples, unquantized, strict=True):
            forced = force(model, tokenizer, sample)
            baseline_NV, candidate_NV = reference.logits_NV.log_softmax(-1), forced.logits_NV.log_softmax(-1)
            divergences.append((baseline_NV.exp() * (baseline_NV - candidate_NV)).sum(-1))
            if sample.check == "none":
                prose_nll += forced.nll
                prose_tokens += len(forced.targets_N)
            else:
                answers.setdefault(sample.workload, []).append(forced.exact)
                flips += reference.exact and not forced.exact
        kl_N = torch.cat(divergences)
        rows[name] = Row(
            mean_kl=kl_N.mean().item(),
            p99_kl=kl_N.quantile(0.99).item(),
            exact={workload: sum(correct) / len(correct) for workload, correct in answers.items()},
            flips=flips,
            perplexity=math.exp(prose_nll / prose_tokens),
        )
    return rows


def main() -> None:
    """Print the table as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkpoint", type=Path, nargs="?", default=CHECKPOINT)
    rows = measure(parser.parse_args().checkpoint, COUNTS)
    chat = [name for name in COUNTS if name != "prose"]
    print("| format | mean KL | 99 % KL | flips | prose PPL | " + " | ".join(chat) + " |")
    print("| --- " * (5 + len(chat)) + "|")
    for name, row in rows.items():
        scores = " | ".join(f"{row.exact[workload]:.3f}" for workload in chat)
        print(f"| {name} | {row.mean_kl:.5f} | {row.p99_kl:.4f} | {row.flips} | {row.perplexity:.3f} | {scores} |")


if __name__ == "__main__":
    main()
