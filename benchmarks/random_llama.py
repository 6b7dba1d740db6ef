"""Write a Llama checkpoint of a published size with random weights, to time verdicts on models that cannot be shipped.

    python -m benchmarks.random_llama 8B /tmp/llama-8b      # 16 GB; 20 seconds on a GPU machine

The tokenizer is the tiny model's; its vocabulary is smaller than the new model's. The model answers no question right. To judge
a cache with this model, pass `gates.min_baseline_probability=0`. Only the seconds and bytes of the report are meaningful.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.recording import ROOT, log
from stages.core.threads import in_threads

TINY = ROOT / "stages" / "tiny" / "checkpoint"
SHAPES: dict[str, dict[str, Any]] = {
    "0.5B": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 16, "num_attention_heads": 16},
    "micro": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8},
    "1B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32},
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
}
"""Shapes by size. 1B is Llama 3.2 1B without tied embeddings, 8B is Llama 3.1 8B, and micro is for tests."""
DEVIATION = 0.02
"""Standard deviation of weights, as in Llama's initialization."""


def config_of(size: str) -> dict[str, Any]:
    """Return the content of config.json."""
    shape, tiny = SHAPES[size], json.loads((TINY / "config.json").read_text())
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **shape,
        "head_dim": shape["hidden_size"] // shape["num_attention_heads"],
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        **{f"{name}_token_id": tiny[f"{name}_token_id"] for name in ("bos", "eos", "pad")},
    }


def shard(config: dict[str, Any], number: int, device: torch.device) -> dict[str, Tensor]:
    """Return the tensors of a file: the embeddings in file 0, then one layer per file."""
    hidden, inner, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    queries, keys = (config[f"num_{name}_heads"] * config["head_dim"] for name in ("attention", "key_value"))
    generator = torch.Generator(device).manual_seed(number)

    def weight(*shape: int) -> Tensor:
        drawn = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
        return (drawn * DEVIATION).cpu()

    def norm() -> Tensor:
        return torch.ones(hidden, dtype=torch.bfloat16)

    if number == 0:
        ends = {f"{name}.weight": weight(vocabulary, hidden) for name in ("model.embed_tokens", "lm_head")}
        return {**ends, "model.norm.weight": norm()}
    linears = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    tensors = {name: weight(*shape) for name, shape in linears.items()}
    tensors |= {name: norm() for name in ("input_layernorm", "post_attention_layernorm")}
    return {f"model.layers.{number - 1}.{name}.weight": tensor for name, tensor in tensors.items()}


def write(size: str, out: Path) -> None:
    """Write a checkpoint of this size to the new directory `out`."""
    out.mkdir(parents=True)
    config, device = config_of(size), torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def write_shard(number: int) -> tuple[dict[str, str], int]:
        name, tensors = f"model-{number:05}.safetensors", shard(config, number, device)
        save_file(tensors, out / name, metadata={"format": "pt"})
        return dict.fromkeys(tensors, name), sum(tensor.nbytes for tensor in tensors.values())

    written = in_threads(write_shard, range(config["num_hidden_layers"] + 1))
    total = sum(size for _, size in written)
    index = {
        "metadata": {"total_size": total},
        "weight_map": {name: file for names, _ in written for name, file in names.items()},
    }
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json"):
        shutil.copyfile(TINY / name, out / name)
    log(f"{out}: {total / 1e9:.2f} GB of weights in {len(written)} files")


def main(argv: Sequence[str] | None = None) -> int:
    """Write the checkpoint that the command line names. Returns the exit code."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.random_llama", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("size", choices=SHAPES)
    parser.add_argument("out", type=Path, help="directory to write, which must not exist")
    arguments = parser.parse_args(argv)
    if arguments.out.exists():
        print(f"{arguments.out}: exists already; name a new directory", file=sys.stderr)
        return 2
    write(arguments.size, arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
