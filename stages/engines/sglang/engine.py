"""The engine of SGLang."""

from pathlib import Path

from pipeline.core.kv import KVPolicy
from stages.engines.base import LOGIT_STEP
from stages.engines.interpreter.bundle import ServedBundle, copy_checkpoint, open_bundle
from stages.engines.interpreter.process import Interpreter, Worker, probe
from stages.engines.interpreter.protocol import Resolved
from stages.engines.interpreter.requests import TIMEOUT_KEY, RequestEngine
from stages.engines.sglang.build import PROGRAM
from stages.engines.sglang.config import SglangConfig

KEY_TENSORS = ("self_attn.k_norm.weight", "self_attn.k_proj.weight", "self_attn.k_proj.bias")
"""What scales a layer's keys: the norm's weight where there is one, else the projection's."""
EVALUATION = {
    "enable_custom_logit_processor": True,
    "disable_radix_cache": True,
    "disable_overlap_schedule": True,
    "skip_tokenizer_init": True,
    "log_level": "error",
}
"""Arguments of an evaluation besides those of serving. No prompt comes from the cache, and no step is scheduled before the last
one's tokens are known: a processor would see each token a step late."""


def load_engine(bundle: Path, config: SglangConfig) -> "SglangEngine":
    """Load a bundle that build_bundle wrote; SGLang itself starts with the first request.

    Raises:
        UserError: A file is missing or was altered.
        MissingRequirement: This machine cannot run the engine.
    """
    described, policy, _ = open_bundle(bundle, ServedBundle, config.name)
    interpreter = probe(PROGRAM, config.python)
    interpreter.require_release(bundle, described.built_for)
    return SglangEngine(bundle, described, policy, interpreter, config)


class SglangEngine(RequestEngine):
    """Requests to SGLang. A cache without scales stores the must-fail control's keys as a checkpoint gives them."""

    length_key = "context_length"

    def __init__(
        self, bundle: Path, described: ServedBundle, policy: KVPolicy, interpreter: Interpreter, config: SglangConfig
    ) -> None:
        super().__init__(bundle, described, policy, interpreter, config)
        self._arguments = {**described.arguments, **EVALUATION}
        self.prefill_chunk = int(self._arguments["chunked_prefill_size"])
        self.logit_step = LOGIT_STEP[str(self._arguments["dtype"])]

    def _open(self) -> Worker:
        worker = self._opened({}, self._checkpoint(), server_args=self._arguments)
        try:
            used = worker.call("facts", self._timeout_s, key=TIMEOUT_KEY, answer=Resolved).arguments
            asked = self._arguments["kv_cache_dtype"]
            if asked != "auto" and used.get("kv_cache_dtype", asked) != asked:
                raise worker.refusal(f"made {used['kv_cache_dtype']} of a cache of type {asked}")
        except BaseException:
            worker.close()
            raise
        return worker

    def _write_faulted(self, checkpoint: Path, out: Path) -> None:
        from safetensors.torch import load_file, save_file

        files = sorted(path.name for path in checkpoint.iterdir())
        loaded = {name: load_file(checkpoint / name) for name in files if name.endswith(".safetensors")}
        copy_checkpoint([name for name in files if name not in loaded], checkpoint, out)
        names = {name for tensors in loaded.values() for name in tensors}
        norm, *projection = KEY_TENSORS
        wanted = (norm,) if any(name.endswith(norm) for name in names) else tuple(projection)
        for file, tensors in loaded.items():
            scaled = {name: t * self._fault if name.endswith(wanted) else t for name, t in tensors.items()}
            save_file(scaled, out / file, metadata={"format": "pt"})
