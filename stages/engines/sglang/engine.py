"""The engine of SGLang."""

from pathlib import Path

from stages.engines.base import LOGIT_STEP
from stages.engines.config import InterpreterConfig
from stages.engines.interpreter.bundle import ServedBundle, copy_linking_weights
from stages.engines.interpreter.process import Worker
from stages.engines.interpreter.protocol import Resolved
from stages.engines.interpreter.requests import RequestEngine
from stages.engines.sglang.backend import PROGRAM

KEY_NORM = "self_attn.k_norm.weight"
KEY_PROJECTION = ("self_attn.k_proj.weight", "self_attn.k_proj.bias")
"""Parameters that scale a layer's keys: the key norm's weight if the model has key norms, otherwise the projection's."""
EVALUATION = {
    "enable_custom_logit_processor": True,
    "disable_radix_cache": True,
    "disable_overlap_schedule": True,
    "skip_tokenizer_init": True,
    "log_level": "error",
}
"""Additional server arguments of an evaluation. Prompts are not reused from the cache. Steps do not overlap, because a logits
processor would see each token one step late."""


class SglangEngine(RequestEngine[ServedBundle, InterpreterConfig]):
    """An engine that sends requests to SGLang.

    Its cache has no scales, so the must-fail control loads a checkpoint that computes wrong keys.
    """

    program = PROGRAM
    record = ServedBundle

    def __init__(self, bundle: Path, config: InterpreterConfig) -> None:
        super().__init__(bundle, config)
        self._arguments = {**self._record.arguments, **EVALUATION}
        self.prefill_chunk = int(self._arguments["chunked_prefill_size"])
        self.logit_step = LOGIT_STEP[str(self._arguments["dtype"])]

    def _open(self) -> Worker:
        worker = self._load_model({}, self._checkpoint(write_faulted), server_args=self._arguments)
        try:
            arguments = worker.call("facts", Resolved).arguments
            expected = self._arguments["kv_cache_dtype"]
            if expected != "auto" and arguments.get("kv_cache_dtype", expected) != expected:
                raise worker.refusal(f"uses a cache of type {arguments['kv_cache_dtype']} instead of {expected}")
        except BaseException:
            worker.close()
            raise
        return worker


def write_faulted(checkpoint: Path, out: Path, factor: float) -> None:
    """Write a copy of a checkpoint to the new directory `out` that computes keys multiplied by `factor`."""
    from safetensors.torch import load_file, save_file

    names = sorted(path.name for path in checkpoint.iterdir())
    loaded = {name: load_file(checkpoint / name) for name in names if name.endswith(".safetensors")}
    copy_linking_weights([name for name in names if name not in loaded], checkpoint, out)
    normed = any(name.endswith(KEY_NORM) for tensors in loaded.values() for name in tensors)
    for file, tensors in loaded.items():
        scaled = {n: t * factor if n.endswith(KEY_NORM if normed else KEY_PROJECTION) else t for n, t in tensors.items()}
        save_file(scaled, out / file, metadata={"format": "pt"})


load_engine = SglangEngine
