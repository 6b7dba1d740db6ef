"""Builds a bundle of llama.cpp: the GGUF and the command of its server."""

from pathlib import Path
from typing import Any

from stages.checkpoints.description import read_config
from stages.core.files import link_or_copy
from stages.core.records import Progress
from stages.engines.interpreter.bundle import ServedBundle, begin_bundle, end_bundle
from stages.engines.interpreter.process import Interpreter, Worker
from stages.engines.interpreter.requests import open_model
from stages.engines.llamacpp.config import LlamaCppConfig
from stages.engines.llamacpp.library import GGUF, PROGRAM, cache_types, rotates
from stages.policies.policy import KVPolicy, Side

COMMAND_FILE = "launch.txt"


class LlamaCppBundle(ServedBundle):
    """`bundle.json`. `arguments` are the parameters of a llama.cpp context."""

    types: dict[str, str]
    """ggml types by side: `key` and `value`."""
    rotates: bool
    model_type: str
    """The model type in transformers, which determines the order of the keys' channels."""


def build_bundle(
    checkpoint: Path, out: Path, config: LlamaCppConfig, *, gguf: Path, policy: KVPolicy, scales: Path, progress: Progress
) -> None:
    """Write a bundle to the empty directory `out`. Raises UserError if the release cannot load the GGUF."""
    interpreter, info, _ = begin_bundle(PROGRAM, config, checkpoint, out, policy, scales, progress)
    progress("build", 0, 2)
    link_or_copy(gguf, out / GGUF)
    types = cache_types(policy, info.shape.head_dim)
    keys = ("n_ctx", "n_seq_max", "n_batch")
    bundle: dict[str, Any] = {
        "arguments": config.model_dump(include=set(keys)),
        "types": {str(side): name for side, name in types.items()},
        "rotates": rotates(policy, info.shape.head_dim),
    }
    progress("build", 1, 2)
    with open_context(interpreter, out / GGUF, config, **bundle):
        pass
    (out / COMMAND_FILE).write_text(_command(config, types, rotated=bundle["rotates"]), encoding="utf-8")
    end_bundle(
        out, LlamaCppBundle, interpreter, info, max_tokens=config.n_ctx, max_batch=config.n_seq_max,
        model_type=str(read_config(checkpoint)["model_type"]), **bundle,
    )  # fmt: skip
    progress("build", 2, 2)


def open_context(
    interpreter: Interpreter,
    gguf: Path,
    config: LlamaCppConfig,
    arguments: dict[str, Any],
    types: dict[str, str],
    rotates: bool,
) -> Worker:
    """Return a worker with the model loaded. Raises UserError if llama.cpp refuses the model."""
    environment = {"LLAMA_ATTN_ROT_DISABLE": str(int(not rotates))}
    said = f"{interpreter.release} cannot load {gguf}"
    fields = {"model": str(gguf.absolute()), "context": arguments, "types": types, "threads": config.threads}
    return open_model(interpreter, environment, config.request_timeout_s, said, **fields)


def _command(config: LlamaCppConfig, types: dict[Side, str], *, rotated: bool) -> str:
    chosen = f"--cache-type-k {types[Side.KEY]} --cache-type-v {types[Side.VALUE]}"
    limits = f"--ctx-size {config.n_ctx * config.n_seq_max} --parallel {config.n_seq_max} --batch-size {config.n_batch}"
    variable = "" if rotated else "LLAMA_ATTN_ROT_DISABLE=1 "
    return f"{variable}llama-server --model {GGUF} {chosen} --flash-attn on {limits}\n"
