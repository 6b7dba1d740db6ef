"""The engine of SGLang."""

from pathlib import Path

from stages.engines.base import LOGIT_STEP
from stages.engines.interpreter.backend import ServedBundle, copy_linking_weights
from stages.engines.interpreter.process import Worker
from stages.engines.interpreter.requests import RequestEngine
from stages.engines.sglang.backend import SglangBackend
from stages.engines.sglang.config import SglangConfig

KEY_NORM = "self_attn.k_norm.weight"
KEY_PROJECTION = ("self_attn.k_proj.weight", "self_attn.k_proj.bias")
"""Parameters that scale a layer's keys: the key norm's weight if the model has key norms, otherwise the projection's."""
FUSED_PROJECTION = "self_attn.qkv_proj.weight"
"""Projection whose rows are those of the queries, then of the keys, then of the values (Phi-3)."""
EVALUATION = {
    "enable_custom_logit_processor": True,
    "disable_radix_cache": True,
    "disable_overlap_schedule": True,
    "skip_tokenizer_init": True,
    "log_level": "error",
}
"""Additional server arguments of an evaluation. Prompts are not reused from the cache. Steps do not overlap, because a logits
processor would see each token one step late."""


class SglangEngine(RequestEngine[ServedBundle, SglangConfig]):
    """An engine of SGLang, whose cache has no scales: the must-fail control loads a checkpoint that computes wrong keys."""

    def __init__(self, bundle: Path, backend: SglangBackend) -> None:
        super().__init__(bundle, backend)
        self._arguments = {**self._record.arguments, **EVALUATION}
        self.prefill_chunk = int(self._arguments["chunked_prefill_size"])
        self.logit_step = LOGIT_STEP[str(self._arguments["dtype"])]

    def _open(self) -> Worker:
        return self._load_model({}, self._checkpoint(self._write_faulted), server_args=self._arguments)

    def _write_faulted(self, checkpoint: Path, out: Path, factor: float) -> None:
        write_faulted(checkpoint, out, factor, self.shape.kv_heads * self.shape.head_dim)


def write_faulted(checkpoint: Path, out: Path, factor: float, key_rows: int) -> None:
    """Write a copy of a checkpoint to the new directory `out` that computes keys multiplied by `factor`.

    A layer's key projection has `key_rows` rows. A fused projection ends with `key_rows` rows for the keys, then `key_rows` for
    the values. Raises RuntimeError if no parameter of the checkpoint is known to scale keys.
    """
    from safetensors.torch import load_file, save_file

    names = sorted(path.name for path in checkpoint.iterdir())
    loaded = {name: load_file(checkpoint / name) for name in names if name.endswith(".safetensors")}
    copy_linking_weights([name for name in names if name not in loaded], checkpoint, out)
    names = [name for tensors in loaded.values() for name in tensors]
    known = ((KEY_NORM,), KEY_PROJECTION, (FUSED_PROJECTION,))
    faulted = next((suffixes for suffixes in known if any(name.endswith(suffixes) for name in names)), None)
    if faulted is None:
        raise RuntimeError("the must-fail control finds no parameter of the checkpoint that scales keys")
    for file, tensors in loaded.items():
        for name in [name for name in tensors if name.endswith(faulted)]:
            tensors[name] = tensors[name].clone()  # the loaded tensors may be the mapped file itself
            keys = tensors[name][-2 * key_rows : -key_rows] if name.endswith(FUSED_PROJECTION) else tensors[name]
            keys *= factor
        save_file(tensors, out / file, metadata={"format": "pt"})


load_engine = SglangEngine
