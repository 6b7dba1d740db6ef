"""The engine of SGLang."""

import tempfile
from pathlib import Path

from pipeline.artifacts.files import link_or_copy
from pipeline.core.errors import MissingRequirement, UserError
from pipeline.core.kv import KVPolicy
from stages.engines.base import LOGIT_STEP
from stages.engines.interpreter.protocol import EmptyAnswer
from stages.engines.interpreter.requests import RequestEngine, open_model
from stages.engines.sglang.bundle import CHECKPOINT, LIBRARY, SglangBundle, open_bundle
from stages.engines.sglang.interpreter import Worker, probe
from stages.engines.sglang.protocol import Facts
from stages.engines.sglang.targets import evaluation

KEY_TENSORS = ("self_attn.k_norm.weight", "self_attn.k_proj.weight", "self_attn.k_proj.bias")
"""What scales a layer's keys: the norm's weight where there is one, else the projection's."""


def load_engine(bundle: Path, *, python: str | None, timeout_s: int) -> "SglangEngine":
    """Load a bundle that build_bundle wrote; SGLang itself starts with the first request.

    Args:
        bundle: The bundle's directory.
        python: SGLang's interpreter, backend.python.
        timeout_s: Seconds that a request may take.

    Raises:
        UserError: A file is missing or was altered.
        MissingRequirement: This machine cannot run the engine.
    """
    described, policy = open_bundle(bundle)
    interpreter = probe(python)
    if described.built_for.version != interpreter.release:
        raise MissingRequirement(
            f"{bundle}: its arguments are pinned for {LIBRARY} {described.built_for.version}, {interpreter.python} has "
            f"{interpreter.release}: build it again with stage=build, or give that release's python as backend.python"
        )
    return SglangEngine(bundle.absolute(), described, policy, interpreter.python, timeout_s=timeout_s)


class SglangEngine(RequestEngine):
    """Requests to SGLang."""

    def __init__(self, bundle: Path, described: SglangBundle, policy: KVPolicy, python: str, *, timeout_s: int) -> None:
        super().__init__(
            policy, described.shape, described.vocab_size,
            max_tokens=described.max_tokens, max_batch=described.max_batch, timeout_s=timeout_s,
        )  # fmt: skip
        self._bundle, self._described, self._python = bundle, described, python
        self.prefill_chunk = int(described.server_args["chunked_prefill_size"])
        self.logit_step = LOGIT_STEP[str(described.server_args["dtype"])]
        self._fault = 1.0
        self._faulted: tempfile.TemporaryDirectory[str] | None = None

    def corrupt_key_scale(self, factor: float) -> None:
        """Let keys be `factor` times the right ones, from the next request on: a cache without scales stores them so."""
        self._fault *= factor
        self.close()

    def _check_fits(self, prompt: int, tokens: int) -> None:
        if prompt + tokens > self.max_tokens:
            raise UserError(
                f"backend.context_length={self.max_tokens}: a prompt of {prompt} tokens with {tokens} more does not fit; "
                "raise it"
            )

    def _open(self) -> Worker:
        worker, arguments = Worker(self._python), evaluation(self._described.server_args)
        open_model(worker, self._checkpoint(), self._timeout_s, EmptyAnswer, server_args=arguments)
        try:
            used = worker.call("facts", self._timeout_s, key="backend.request_timeout_s", answer=Facts).server_args
            asked = arguments["kv_cache_dtype"]
            if asked != "auto" and used.get("kv_cache_dtype", asked) != asked:
                raise worker.refusal(f"made {used['kv_cache_dtype']} of a cache of type {asked}")
        except BaseException:
            worker.close()
            raise
        return worker

    def _checkpoint(self) -> Path:
        """The checkpoint's directory. With a fault, another one is written for it."""
        if self._fault == 1.0:
            return self._bundle / CHECKPOINT
        self._faulted = tempfile.TemporaryDirectory(prefix="kvgate-canary-")
        faulted = Path(self._faulted.name) / CHECKPOINT
        write_faulted(self._bundle / CHECKPOINT, faulted, self._fault)
        return faulted


def write_faulted(checkpoint: Path, out: Path, factor: float) -> None:
    """Write a checkpoint to the new directory `out` whose keys are `factor` times the right ones, in every layer."""
    from safetensors.torch import load_file, save_file

    out.mkdir()
    weights = [path for path in sorted(checkpoint.iterdir()) if path.suffix == ".safetensors"]
    for path in checkpoint.iterdir():
        if path not in weights:
            link_or_copy(path, out / path.name)
    loaded = {path.name: load_file(path) for path in weights}
    names = {name for tensors in loaded.values() for name in tensors}
    norm, *projection = KEY_TENSORS
    wanted = (norm,) if any(name.endswith(norm) for name in names) else tuple(projection)
    for file, tensors in loaded.items():
        scaled = {name: t * factor if name.endswith(wanted) else t for name, t in tensors.items()}
        save_file(scaled, out / file, metadata={"format": "pt"})
