"""How the checkpoint reacts to KV-cache formats, by fake quantization: `python -m stages.tiny.sensitivity [DIR]`.

Keys after RoPE and values are rounded in every layer, over the whole past, while references are forced. This is the
reference that the planted outliers were tuned with; the engines of the pipeline are measured by `evaluate`.
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

Rounding = Callable[[Tensor, float], Tensor]  # (batch, kv_heads, tokens, head_dim), amax of the layer's tensor


def exact(x_BGTD: Tensor, _amax: float) -> Tensor:
    return x_BGTD


def fp8_per_tensor(x_BGTD: Tensor, amax: float) -> Tensor:
    scale = amax / FP8_MAX
    codes = (x_BGTD / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return codes.float() * scale


def integer(levels: int, per_tensor: bool = False) -> Rounding:
    """Symmetric codes -levels..levels, with one scale per token and head, or one for the layer."""

    def rounded(x_BGTD: Tensor, amax: float) -> Tensor:
        top = torch.tensor(amax) if per_tensor else x_BGTD.abs().amax(-1, keepdim=True)
        scale = top.clamp(min=1e-8) / levels
        return (x_BGTD / scale).round().clamp(-levels, levels) * scale

    return rounded


# name -> (keys, values); head_dim is 64, so int4 in groups of 64 is int4 per token and head
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


@dataclass
class FakeQuantizer:
    """The attention function, with the running format and the calibrated amax of every layer."""

    keys: Rounding = exact
    values: Rounding = exact
    amax: dict[tuple[int, str], float] = field(default_factory=dict)
    calibrating: bool = True

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
    """Measured against the unquantized model."""

    mean_kl: float
    p99_kl: float
    exact: dict[str, float]
    flips: int
    """Chat samples answered exactly before and not after."""
    perplexity: float


def measure(checkpoint: Path, counts: dict[str, int], seed: int = 0) -> dict[str, Row]:
    """One row a format, over `counts` samples by workload; prose is among them."""
    quantizer = FakeQuantizer()
    AttentionInterface.register(NAME, quantizer)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)  # type: ignore[no-untyped-call]
    model = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation=NAME)
    for name in counts:
        for sample in generate(name, 8, seed, "calibration"):
            force(model, tokenizer, sample)
    quantizer.calibrating = False
    samples = [sample for name, count in counts.items() for sample in generate(name, count, seed)]
    base = [force(model, tokenizer, sample) for sample in samples]
    rows = {}
    for name, (quantizer.keys, quantizer.values) in FORMATS.items():
        divergences, flips = [], 0
        right: dict[str, list[bool]] = {}
        prose_nll = prose_tokens = 0.0
        for sample, reference in zip(samples, base, strict=True):
            forced = force(model, tokenizer, sample)
            before, after = reference.logits_NV.log_softmax(-1), forced.logits_NV.log_softmax(-1)
            divergences.append((before.exp() * (before - after)).sum(-1))
            if sample.check == "none":
                prose_nll += forced.nll
                prose_tokens += len(forced.targets_N)
            else:
                right.setdefault(sample.workload, []).append(forced.exact)
                flips += reference.exact and not forced.exact
        kl_N = torch.cat(divergences)
        rows[name] = Row(
            mean_kl=kl_N.mean().item(),
            p99_kl=kl_N.quantile(0.99).item(),
            exact={workload: sum(answers) / len(answers) for workload, answers in right.items()},
            flips=flips,
            perplexity=math.exp(prose_nll / prose_tokens),
        )
    return rows


def main() -> None:
    """Print the table as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
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
