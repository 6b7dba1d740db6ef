"""The bundle of a library that runs in another interpreter: a checkpoint and the arguments that serve it."""

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from stages.checkpoints.description import CheckpointInfo, inspect_checkpoint
from stages.checkpoints.exports import holder
from stages.core.digest import tree_files
from stages.core.errors import UserError
from stages.core.files import link_or_copy_all
from stages.core.records import Progress
from stages.engines import bundle
from stages.engines.bundle import BuiltFor, ModelRecord, write_bundle
from stages.engines.config import InterpreterConfig
from stages.engines.interpreter.process import Interpreter, Program, Worker, WorkerError, probe
from stages.engines.interpreter.protocol import Resolved
from stages.policies.policy import KVPolicy, KVShape
from stages.policies.scales import KVScales

CHECKPOINT = "checkpoint"
"""Folder of the served checkpoint."""


class ServedBundle(ModelRecord):
    """`bundle.json`."""

    built_for: BuiltFor
    layers: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_tokens: int
    """Maximum tokens per sequence."""
    max_batch: int
    arguments: dict[str, Any]
    """Serving arguments under the library's own names."""

    @property
    def shape(self) -> KVShape:
        return KVShape(self.layers, self.kv_heads, self.head_dim)


def cannot_hold(policy: KVPolicy, backend: str, reason: str, choices: str) -> str:
    """Return the message of a policy that a library's cache cannot store, with alternatives."""
    return (
        f"kv={policy.name}: backend={backend} cannot hold it ({reason}); choose {choices}, or {holder(policy)}, which runs it"
    )


def begin_bundle(
    program: Program, config: InterpreterConfig, checkpoint: Path, out: Path, policy: KVPolicy, scales: Path, progress: Progress
) -> tuple[Interpreter, CheckpointInfo, KVScales]:
    """Write policy, scales and tokenizer to `out`; return the interpreter, the checkpoint's description and the scales."""
    interpreter = probe(program, config.python)
    if interpreter.unread is not None:
        progress(interpreter.unread, 0, 0)
    info = inspect_checkpoint(checkpoint)
    return interpreter, info, bundle.begin_bundle(checkpoint, out, policy, scales, info.shape)


def copy_checkpoint(names: Iterable[str], source: Path, out: Path) -> None:
    """Write the named files of a checkpoint to the new directory `out`. Weights are hard-linked if possible."""
    out.mkdir()
    names = list(names)
    link_or_copy_all([name for name in names if name.endswith(".safetensors")], source, out)
    for name in names:
        if not name.endswith(".safetensors"):
            shutil.copyfile(source / name, out / name)


def resolve(interpreter: Interpreter, checkpoint: Path, field: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments as the library resolves them for a checkpoint. The worker receives them as `field`.

    Raises UserError if the library refuses or changes an argument.
    """
    title = f"{interpreter.program.library} {interpreter.release}"
    asked = {"model": str(checkpoint.absolute()), field: dict(arguments)}
    with Worker(interpreter.program, interpreter.python) as worker:
        try:
            resolved = worker.call("validate", Resolved, **asked).arguments
        except WorkerError as error:
            refused = f"{interpreter.release} refuses these {field.replace('_args', ' arguments')}"
            raise worker.refusal(f"{refused}: {error}") from error
    # `auto` lets the library choose.
    changed = [name for name, value in arguments.items() if name in resolved and value != "auto" and value != resolved[name]]
    if changed:
        listed = "; ".join(f"{name} was asked as {arguments[name]} and is {resolved[name]}" for name in changed)
        raise UserError(f"backend.{changed[0]}: {title} rewrites it: {listed}; ask for the rewritten value")
    return resolved


def end_bundle(out: Path, record: type[ServedBundle], interpreter: Interpreter, info: CheckpointInfo, **fields: Any) -> None:
    """Write `bundle.json`, which lists all files of `out`; `fields` are the record's remaining fields."""
    known = {
        "backend": interpreter.program.backend,
        "files": tree_files(out),
        "built_for": BuiltFor(
            library=interpreter.program.library,
            version=interpreter.release,
            compute_capabilities=interpreter.compute_capabilities,
        ),
        "layers": info.shape.layers,
        "kv_heads": info.shape.kv_heads,
        "head_dim": info.shape.head_dim,
        "vocab_size": info.vocab_size,
    }
    write_bundle(out, record.model_validate({**known, **fields}))
