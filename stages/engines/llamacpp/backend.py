"""Implements backend=llamacpp: maps a policy to cache types, and builds bundles of a GGUF and the command of llama-server."""

from pathlib import Path
from typing import Any

from stages.checkpoints.description import CheckpointInfo, read_config
from stages.checkpoints.exports import describe_format, single_format_refusal
from stages.core.errors import UserError
from stages.core.files import link_or_copy
from stages.engines.backend import ROUNDING, Artifacts, Job, Source
from stages.engines.interpreter import protocol
from stages.engines.interpreter.backend import InterpreterBackend, ServedBundle, cannot_hold
from stages.engines.interpreter.process import Interpreter, Program, Worker
from stages.engines.interpreter.requests import open_model
from stages.engines.llamacpp import worker
from stages.engines.llamacpp.config import LlamaCppConfig
from stages.policies.policy import KVPolicy, Side
from stages.policies.table import CODES

CHECKED_RELEASE = "0.3.36"
GGUF = "model.gguf"
MIN_ROTATED = 64
"""llama.cpp rotates only if head_dim is a multiple of this number of channels. Values are rotated in blocks of this size."""


class LlamaCppDescription(protocol.Description):
    """Answer to `describe`."""

    types: list[str]
    """ggml types that the release supports."""


PROGRAM = Program(
    "llamacpp",
    "llama-cpp-python",
    Path(worker.__file__).with_name("kvgate_llamacpp_worker.py"),
    "make llamacpp compiles it into .venv-llamacpp: backend.python=.venv-llamacpp/bin/python; or give the python of an "
    f"environment with pip install llama-cpp-python=={CHECKED_RELEASE}",
    checked_releases=("0.3",),
    oldest_release=(0, 3),
    description=LlamaCppDescription,
)


def cache_types(policy: KVPolicy, head_dim: int) -> dict[Side, str]:
    """Return llama.cpp's types of keys and values for a policy. Raises UserError if llama.cpp does not support the policy."""
    reason = single_format_refusal(policy.model_copy(update={"value": policy.key}))
    forms = {Side.KEY: policy.key, Side.VALUE: policy.value}
    types = {side: form.code.llamacpp for side, form in forms.items()}
    for side, form in forms.items():
        if reason is None and types[side] is None:
            reason = f"{describe_format(form)} {side}s are not supported by this engine"
    if reason is not None:
        dtypes = ", ".join(sorted(f"{code.name}" for code in CODES.values() if code.llamacpp is not None))
        raise UserError(cannot_hold(policy, "llamacpp", reason, f"kv=llamacpp_q8_0, or keys and values of dtype {dtypes}"))
    for side, form in forms.items():
        if form.code.dynamic_group and head_dim % form.code.dynamic_group:
            raise UserError(
                f"kv.{side}.dtype={form.dtype}: its blocks of {form.code.dynamic_group} channels do not divide the model's "
                f"head_dim {head_dim}; choose kv=fp16"
            )
    rotates(policy, head_dim)
    return {side: str(name) for side, name in types.items()}


def rotates(policy: KVPolicy, head_dim: int) -> bool:
    """Return whether a policy rotates quantized keys and values, as llama.cpp does unless LLAMA_ATTN_ROT_DISABLE is set.

    Raises UserError for a rotation that llama.cpp does not perform. It rotates either all quantized sides or no side: keys in
    blocks of the largest power of two that divides head_dim, values in blocks of 64.
    """
    blocks = {Side.KEY: head_dim & -head_dim, Side.VALUE: MIN_ROTATED}
    sizes = {"hadamard": head_dim, "hadamard_64": MIN_ROTATED}
    forms = {side: form for side, form in ((Side.KEY, policy.key), (Side.VALUE, policy.value)) if form.code.dynamic_group}
    rotated = [side for side, form in forms.items() if form.rotation != "none"]
    for side in rotated:
        if head_dim % MIN_ROTATED or sizes.get(forms[side].rotation) != blocks[side] or len(rotated) != len(forms):
            raise UserError(
                f"kv.{side}.rotation={forms[side].rotation}: llama.cpp rotates both sides or none, needs a head_dim that is a "
                f"multiple of 64, and rotates keys in blocks of {blocks[Side.KEY]} and values in blocks of 64; set "
                f"{' '.join(f'kv.{other}.rotation=none' for other in forms)}"
            )
    return bool(rotated)


COMMAND_FILE = "launch.txt"


class LlamaCppBundle(ServedBundle):
    """`bundle.json`. `arguments` are the parameters of a llama.cpp context."""

    model_type: str
    """The model type in transformers, which determines the order of the keys' channels."""


def open_context(
    interpreter: Interpreter, gguf: Path, arguments: dict[str, Any], policy: KVPolicy, head_dim: int, threads: int | None
) -> Worker:
    """Return a worker with the model loaded. Raises UserError if llama.cpp refuses the model."""
    environment = {"LLAMA_ATTN_ROT_DISABLE": str(int(not rotates(policy, head_dim)))}
    refusal, types = f"{interpreter.release} cannot load {gguf}", cache_types(policy, head_dim)
    fields = {"model": str(gguf.absolute()), "context": arguments, "types": types, "threads": threads}
    return open_model(interpreter, environment, refusal, **fields)


def _command(config: LlamaCppConfig, policy: KVPolicy, head_dim: int) -> str:
    types = cache_types(policy, head_dim)
    chosen = f"--cache-type-k {types[Side.KEY]} --cache-type-v {types[Side.VALUE]}"
    limits = f"--ctx-size {config.n_ctx * config.n_seq_max} --parallel {config.n_seq_max} --batch-size {config.n_batch}"
    variable = "" if rotates(policy, head_dim) else "LLAMA_ATTN_ROT_DISABLE=1 "
    return f"{variable}llama-server --model {GGUF} {chosen} --flash-attn on {limits}\n"


class LlamaCppBackend(InterpreterBackend[LlamaCppConfig]):
    """A backend whose bundle is the user's GGUF and the arguments of llama-server."""

    program = PROGRAM
    record = LlamaCppBundle
    running_keys = ("threads",)
    gguf: Path
    rounding = ROUNDING["bfloat16"]
    """Upper bound: before a product with quantized weights, llama.cpp rounds the activations to blocks of 8 bits, with an error
    like bfloat16's. With 16-bit weights the error is smaller; `measures_rounding` measures it on the baseline."""
    measures_rounding = True

    def check_inputs(self, job: Job) -> None:
        if not job.builds:
            return
        types = cache_types(job.policy, job.checkpoint.shape.head_dim)
        path = job.checkpoint.path
        if path.is_dir():
            raise UserError(
                f"model.path={path}: backend=llamacpp takes a GGUF; write one with llama.cpp's convert_hf_to_gguf.py {path} "
                "--outfile model.gguf, and give model.path=model.gguf"
            )
        self._check_checkpoint(job)
        described = self.interpreter.description
        for side, name in types.items():
            if name not in described.types:
                raise UserError(
                    f"kv.{side}.dtype: llama-cpp-python {described.release} has no type {name}; choose kv=fp16, or install "
                    "a newer release"
                )

    def source(self, artifacts: Artifacts, policy: KVPolicy) -> Source:
        """Return the reference engine's checkpoint with the digest of the GGUF, and set `gguf` for `write_served`."""
        self.gguf = artifacts.source_path
        return Source(super().source(artifacts, policy).path, artifacts.digest_of(self.gguf))

    def write_served(self, out: Path, info: CheckpointInfo, policy: KVPolicy) -> dict[str, Any]:
        link_or_copy(self.gguf, out / GGUF)
        arguments, head_dim = self.config.model_dump(include={"n_ctx", "n_seq_max", "n_batch"}), info.shape.head_dim
        with open_context(self.interpreter, out / GGUF, arguments, policy, head_dim, self.config.threads):
            pass
        (out / COMMAND_FILE).write_text(_command(self.config, policy, head_dim), encoding="utf-8")
        model_type = str(read_config(info.path)["model_type"])
        return {"max_batch": self.config.n_seq_max, "model_type": model_type, "arguments": arguments}


open_backend = LlamaCppBackend
