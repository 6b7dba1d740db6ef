"""Builds a bundle of the torch backend: the checkpoint itself, the policy and its scales."""

from pathlib import Path

from stages.checkpoints.description import inspect_checkpoint
from stages.core.digest import file_digests
from stages.core.files import link_or_copy_all
from stages.core.records import Progress
from stages.engines.bundle import BundleRecord, open_record, read_policy, read_scales, write_bundle
from stages.policies.policy import POLICY_FILE, KVPolicy
from stages.policies.scales import SCALES_FILE, KVScales, write_policy

BACKEND = "torch"


def build_bundle(checkpoint: Path, out: Path, *, policy: KVPolicy, scales: Path, progress: Progress) -> None:
    """Write a bundle. Its weights are linked from the checkpoint's artifact, or copied if linking fails."""
    info = inspect_checkpoint(checkpoint)
    policy.check_shape(info.shape)
    write_policy(out, policy, read_scales(scales, policy, info.shape))
    files = (*info.weight_files, *info.other_files)
    progress("build", 0, 1)
    link_or_copy_all(files, checkpoint, out)
    write_bundle(out, BundleRecord(backend=BACKEND, files=file_digests(out, (*files, POLICY_FILE, SCALES_FILE))))
    progress("build", 1, 1)


def open_torch_bundle(directory: Path) -> tuple[KVPolicy, KVScales]:
    """Read and verify a bundle. Raises UserError, which names the file, if a file is missing or has changed since the build."""
    open_record(directory, BundleRecord, BACKEND)
    return read_policy(directory, inspect_checkpoint(directory).shape)
