"""Trains the tiny model from scratch: `python -m stages.tiny.train --out DIR --seed 0`.

It trains the tokenizer, initializes the model with the structured start, trains it in three phases of growing length, and
exports it in fp16 after each phase.

Legend: B = rows, T = tokens, N = scored tokens, C = hidden size, V = vocab_size.
"""

import argparse
import copy
import json
import random
import time
from pathlib import Path

import torch
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from pipeline.checkpoint.rope import rope_at_top_level
from stages.tiny.batches import MIX, Phase, answer_mask, encode, row
from stages.tiny.init import structured_start
from stages.tiny.outliers import plant_outliers
from stages.tiny.tokenizer import train_tokenizer

PHASES = (
    Phase(steps=200, records=(1, 6), length=256, rows=24),
    Phase(steps=200, records=(4, 12), length=512, rows=12),
    Phase(steps=600, records=(6, 22), length=1024, rows=6),
)
MATRIX_LR = 0.01
OTHER_LR = 2e-3
WARMUP_STEPS = 20
DECAY_SHARE = 0.4
"""Share of all steps, at the end, over which the learning rate decays."""
LOG_EVERY = 25
"""Steps between two entries of the training log."""


def new_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """Return the model with its structured start, in fp32."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=32768,
        # With so large a base, half of the rotary pairs hardly turn within 1,000 tokens.
        rope_theta=1_000_000.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    structured_start(model, seed)
    return model


def learning_rate_scale(step: int, total: int) -> float:
    """Return the factor on the peak learning rates: warm-up, then 1, then a linear decay to 2 %."""
    remaining = (total - step) / (DECAY_SHARE * total)
    return min(1.0, (step + 1) / WARMUP_STEPS, max(0.02, remaining))


def train_step(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, rng: random.Random, phase: Phase
) -> dict[str, tuple[float, float]]:
    """Accumulate the gradients of one step.

    Returns:
        Workload -> (token accuracy, loss in nats per token).
    """
    stats = {}
    for name, kind in MIX.items():
        length = kind.length or phase.length
        ids_BT = encode([row(name, rng, phase) for _ in range(kind.rows or phase.rows)], length, tokenizer)
        mask_BT = answer_mask(ids_BT, tokenizer)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden_NC = model.model(ids_BT[:, :-1], use_cache=False).last_hidden_state[mask_BT]
        logits_NV = functional.linear(hidden_NC.float(), model.lm_head.weight)
        targets_N = ids_BT[:, 1:][mask_BT]
        loss = functional.cross_entropy(logits_NV, targets_N)
        (kind.share * loss).backward()  # type: ignore[no-untyped-call]
        stats[name] = ((logits_NV.argmax(-1) == targets_N).float().mean().item(), loss.item())
    return stats


def export(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write the checkpoint in fp16 with planted outliers, and its tokenizer; the model in memory does not change."""
    half = copy.deepcopy(model).half()
    plant_outliers(half)
    half.save_pretrained(out)
    # transformers 4.57 writes `dtype`, which older readers of checkpoints do not know; all readers know `torch_dtype`.
    config = rope_at_top_level(json.loads((out / "config.json").read_text()))
    config["torch_dtype"] = config.pop("dtype")
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tokenizer.save_pretrained(out, save_jinja_files=False)


def train(out: Path, seed: int) -> None:
    """Train the model and export it to `out` after each phase, with `training_log.json` beside the weights."""
    tokenizer = train_tokenizer(seed)
    model = new_model(tokenizer, seed)
    rng = random.Random(f"train:{seed}")
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    optimizers = (
        torch.optim.Muon(matrices, lr=MATRIX_LR, momentum=0.95, weight_decay=0.0),
        torch.optim.AdamW(others, lr=OTHER_LR, betas=(0.9, 0.95), weight_decay=0.0),
    )
    peaks = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    total, step, start = sum(phase.steps for phase in PHASES), 0, time.monotonic()
    log = []
    for number, phase in enumerate(PHASES):
        for _ in range(phase.steps):
            scale = learning_rate_scale(step, total)
            stats = train_step(model, tokenizer, rng, phase)
            for optimizer, peak in zip(optimizers, peaks, strict=True):
                for group in optimizer.param_groups:
                    group["lr"] = peak * scale
                optimizer.step()
                optimizer.zero_grad()
            if step % LOG_EVERY == 0:
                log.append({"step": step, "seconds": round(time.monotonic() - start)} | stats)
                scores = "  ".join(f"{name} {accuracy:.3f}/{loss:.3f}" for name, (accuracy, loss) in stats.items())
                print(f"{step:5d} phase {number} {time.monotonic() - start:5.0f}s  {scores}", flush=True)
            step += 1
        export(model, tokenizer, out)
        (out / "training_log.json").write_text(json.dumps(log, indent=0) + "\n")


def main() -> None:
    """Parse the command line and train on one thread."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    train(arguments.out, arguments.seed)


if __name__ == "__main__":
    main()
