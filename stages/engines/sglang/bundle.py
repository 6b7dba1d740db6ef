"""The bundle on disk: the checkpoint, the arguments, and the check that it is still what was built."""

import shutil
from pathlib import Path
from typing import Any

from pipeline.artifacts.digest import file_digest
from pipeline.artifacts.files import link_or_copy
from pipeline.checkpoint.description import inspect_checkpoint
from pipeline.checkpoint.files import TOKENIZER_FILES
from pipeline.core.kv import POLICY_FILE, KVPolicy, KVShape
from pipeline.core.records import Progress
from pipeline.core.scales import SCALES_FILE
from stages.engines.bundle import BuiltFor, BundleRecord, open_record, read_policy, read_scales, write_bundle, write_policy
from stages.engines.sglang.config import SglangConfig
from stages.engines.sglang.interpreter import READ, probe
from stages.engines.sglang.targets import cache_dtype, command, server_args

BACKEND = "sglang"
LIBRARY = "SGLang"
CHECKPOINT = "checkpoint"
COMMAND_FILE = "launch.txt"


class SglangBundle(BundleRecord):
    """`bundle.json`."""

    built_for: BuiltFor
    layers: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_tokens: int
    max_batch: int
    server_args: dict[str, Any]

    @property
    def shape(self) -> KVShape:
        return KVShape(self.layers, self.kv_heads, self.head_dim)


def build_bundle(
    checkpoint: Path, out: Path, *, policy: KVPolicy, scales: Path, progress: Progress, release: str, **options: object
) -> None:
    """Write a bundle.

    Args:
        checkpoint: The quantized checkpoint.
        out: An empty directory.
        policy: How the cache is stored.
        scales: The policy's static scales, all 1.0 or none.
        progress: Called with the steps that are done.
        release: The interpreter's release of SGLang.
        options: The backend's build_parts.

    Raises:
        UserError: SGLang has no such cache.
        MissingRequirement: SGLang is not installed.
    """
    config = SglangConfig.model_validate({**options, "name": BACKEND, "request_timeout_s": 600})
    interpreter = probe(config.python)
    if release != READ:
        progress(f"warning: SGLang {release} was not read, {READ} was: arguments and processors may differ", 0, 0)
    info = inspect_checkpoint(checkpoint)
    write_policy(out, policy, read_scales(scales, policy, info.shape))
    (out / CHECKPOINT).mkdir()
    for name in info.weight_files:
        link_or_copy(info.path / name, out / CHECKPOINT / name)
    for name in info.other_files:
        shutil.copyfile(info.path / name, out / CHECKPOINT / name)
    for name in TOKENIZER_FILES:
        if (checkpoint / name).is_file():
            shutil.copyfile(checkpoint / name, out / name)
    arguments = server_args(config, cache_dtype(policy, config))
    (out / COMMAND_FILE).write_text(command(arguments, CHECKPOINT) + "\n", encoding="utf-8")
    names = [POLICY_FILE, SCALES_FILE, COMMAND_FILE]
    names += sorted(path.relative_to(out).as_posix() for path in (out / CHECKPOINT).iterdir())
    built_for = BuiltFor(library=LIBRARY, version=release, compute_capabilities=interpreter.compute_capabilities)
    bundle = SglangBundle(
        backend=BACKEND,
        files={name: file_digest(out / name) for name in names},
        built_for=built_for,
        layers=info.shape.layers,
        kv_heads=info.shape.kv_heads,
        head_dim=info.shape.head_dim,
        vocab_size=info.vocab_size,
        max_tokens=config.context_length,
        max_batch=config.max_running_requests,
        server_args=arguments,
    )
    write_bundle(out, bundle)


def open_bundle(directory: Path) -> tuple[SglangBundle, KVPolicy]:
    """Read and verify a bundle. Raises UserError naming the file that is missing or not the one that was built."""
    bundle = open_record(directory, SglangBundle, BACKEND)
    policy, _ = read_policy(directory, bundle.shape)
    return bundle, policy
