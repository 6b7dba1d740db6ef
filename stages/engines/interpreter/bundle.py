"""The bundle of a library that runs in an interpreter of its own: a checkpoint, and the arguments that serve it."""

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pipeline.artifacts.digest import tree_files
from pipeline.artifacts.files import link_or_copy_all
from pipeline.checkpoint.description import CheckpointInfo, inspect_checkpoint
from pipeline.checkpoint.exports import holder
from pipeline.core.kv import KVPolicy, KVShape
from pipeline.core.records import Progress
from pipeline.core.scales import KVScales
from stages.engines import bundle
from stages.engines.bundle import BuiltFor, ModelRecord, write_bundle
from stages.engines.interpreter.config import InterpreterConfig
from stages.engines.interpreter.process import Interpreter, Program, probe

CHECKPOINT = "checkpoint"
"""Folder of the checkpoint that is served."""


class ServedBundle(ModelRecord):
    """`bundle.json`."""

    built_for: BuiltFor
    layers: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_tokens: int
    """Most tokens of a sequence."""
    max_batch: int
    arguments: dict[str, Any]
    """Of serving, by the library's own names."""

    @property
    def shape(self) -> KVShape:
        return KVShape(self.layers, self.kv_heads, self.head_dim)


def cannot_hold(policy: KVPolicy, backend: str, reason: str, choices: str) -> str:
    """Say why a library's cache is not the policy's, and what is."""
    return (
        f"kv={policy.name}: backend={backend} cannot hold it ({reason}); choose {choices}, or {holder(policy)}, which runs it"
    )


def begin_bundle(
    program: Program, config: InterpreterConfig, checkpoint: Path, out: Path, policy: KVPolicy, scales: Path, progress: Progress
) -> tuple[Interpreter, CheckpointInfo, KVScales]:
    """Write policy, scales and tokenizer to `out`; return the library, what the checkpoint is, and the scales."""
    interpreter = probe(program, config.python)
    if interpreter.unread is not None:
        progress(interpreter.unread, 0, 0)
    info = inspect_checkpoint(checkpoint)
    return interpreter, info, bundle.begin_bundle(checkpoint, out, policy, scales, info.shape)


def copy_checkpoint(names: Iterable[str], source: Path, out: Path) -> None:
    """Write files of a checkpoint to the new directory `out`; weights are once on disk within a store."""
    out.mkdir()
    names = list(names)
    link_or_copy_all([name for name in names if name.endswith(".safetensors")], source, out)
    for name in names:
        if not name.endswith(".safetensors"):
            shutil.copyfile(source / name, out / name)


def end_bundle(out: Path, record: type[ServedBundle], interpreter: Interpreter, info: CheckpointInfo, **fields: Any) -> None:
    """Write `bundle.json` of all that is in `out`; `fields` are those of the record that this does not know."""
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
