"""The bundle of a library in another interpreter: a checkpoint, and the arguments to serve it."""

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from stages.checkpoints.exports import supporting_backend
from stages.core.errors import UserError
from stages.core.files import link_or_copy_all
from stages.engines.bundle import BuiltFor, ModelRecord
from stages.engines.interpreter.process import Interpreter, Worker, WorkerError
from stages.engines.interpreter.protocol import Resolved
from stages.policies.policy import KVPolicy, KVShape

CHECKPOINT = "checkpoint"


class ServedBundle(ModelRecord):
    """`bundle.json`."""

    built_for: BuiltFor
    layers: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_tokens: int
    max_batch: int
    arguments: dict[str, Any]
    """Serving arguments under the library's own names."""

    @property
    def shape(self) -> KVShape:
        return KVShape(self.layers, self.kv_heads, self.head_dim)


def cannot_hold(policy: KVPolicy, backend: str, reason: str, choices: str) -> str:
    """Return the error message for a policy that a library's cache cannot store, with alternatives."""
    alternative = supporting_backend(policy)
    return f"kv={policy.name}: backend={backend} cannot hold it ({reason}); choose {choices}, or {alternative}, which runs it"


def copy_linking_weights(names: Iterable[str], source: Path, out: Path) -> None:
    """Write the named files of a checkpoint to the new directory `out`. Weights are hard-linked if possible."""
    out.mkdir()
    names = list(names)
    link_or_copy_all([name for name in names if name.endswith(".safetensors")], source, out)
    for name in names:
        if not name.endswith(".safetensors"):
            shutil.copyfile(source / name, out / name)


def resolve(interpreter: Interpreter, checkpoint: Path, field: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments as the library resolves them for a checkpoint. `field` names the arguments in the request to the worker.

    Raises UserError if the library refuses or changes an argument.
    """
    title = f"{interpreter.program.library} {interpreter.release}"
    fields = {"model": str(checkpoint.absolute()), field: dict(arguments)}
    with Worker(interpreter.program, interpreter.python) as worker:
        try:
            resolved = worker.call("validate", Resolved, **fields).arguments
        except WorkerError as error:
            refused = f"{interpreter.release} refuses these {field.replace('_args', ' arguments')}"
            raise worker.refusal(f"{refused}: {error}") from error
    # `auto` lets the library choose.
    changed = [name for name, value in arguments.items() if name in resolved and value != "auto" and value != resolved[name]]
    if changed:
        changes = "; ".join(f"{name}={arguments[name]} becomes {resolved[name]}" for name in changed)
        raise UserError(f"backend.{changed[0]}: {title} changes it: {changes}; set the changed value")
    return resolved
