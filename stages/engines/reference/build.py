"""Builds a bundle of the torch backend: the checkpoint itself, the policy and its scales."""

from dataclasses import asdict
from pathlib import Path

from stages.checkpoints.description import inspect_checkpoint
from stages.core.digest import file_digests
from stages.core.files import link_or_copy_all
from stages.core.records import Progress
from stages.engines.bundle import ShapedRecord, read_scales, write_bundle
from stages.policies.policy import POLICY_FILE, KVPolicy
from stages.policies.scales import SCALES_FILE, write_policy

BACKEND = "torch"


def build_bundle(checkpoint: Path, out: Path, *, policy: KVPolicy, scales: Path, progress: Progress) -> None:
    """Write a bundle. Its weights are linked from the checkpoint's artifact, or copied if linking fails."""
    info = inspect_checkpoint(checkpoint)
    policy.check_shape(info.shape)
    write_policy(out, policy, read_scales(scales, policy, info.shape))
    files = (*info.weight_files, *info.other_files)
    progress("build", 0, 1)
    link_or_copy_all(files, checkpoint, out)
    digests = file_digests(out, (*files, POLICY_FILE, SCALES_FILE))
    write_bundle(out, ShapedRecord(backend=BACKEND, files=digests, **asdict(info.shape)))
    progress("build", 1, 1)
