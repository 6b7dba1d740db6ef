"""The checks that come before any work: files that the configuration names, the policy, what the backend needs."""

from importlib.util import find_spec
from pathlib import Path

from pipeline.artifacts.backend import Job
from pipeline.config.config import Config
from pipeline.config.policies import tuned_policies
from pipeline.core.checkpoint import CheckpointInfo, inspect_checkpoint, locate_checkpoint
from pipeline.core.checkpoint_weights import check_weights
from pipeline.core.errors import MissingRequirement, UserError
from pipeline.gguf.model import inspect_gguf
from pipeline.planning.capacity import memory_budget
from pipeline.planning.shapes import read_model
from pipeline.registry import summary
from pipeline.run.loading import evaluation, open_loader, required_libraries

WITHOUT_CHECKPOINT = ("promote", "rollback", "verify")
"""Stages that work on what other commands left."""

PLANNING = ("capacity", "recommend")
"""Stages that read a model's shapes alone."""


def check_inputs(config: Config) -> None:
    """Refuse what cannot be used; cheap, reads no weights.

    Raises:
        UserError: for a file that cannot be used, summary.json or one that the configuration names, and for a policy that
            does not fit the model or the backend.
        MissingRequirement: for a library, a GPU or an interpreter that the backend needs and that is not here.
    """
    if config.work.exists() and not config.work.is_dir():
        raise UserError(f"workdir={config.workdir}: is not a directory; give one, or a path that does not exist yet")
    if config.stage != "verify":
        summary.load(config.work)  # every other stage writes to it; a file that it cannot write to is refused before the work
    if config.stage == "verify" and not Path(str(config.bundle)).is_dir():
        raise UserError(f"bundle={config.bundle}: no such directory")
    if config.stage in WITHOUT_CHECKPOINT:
        return
    if config.stage in PLANNING:
        memory_budget(read_model(locate_checkpoint(config.model.path)), config.capacity, config.weights.format)
        return
    checkpoint = _inspect_model(locate_checkpoint(config.model.path))
    config.kv.check_shape(checkpoint.shape)
    if config.stage == "tune":
        tuned_policies(config, checkpoint.shape)
    for key, path in (("calibration.jsonl", config.calibration.file), ("workloads.jsonl", config.workloads.file)):
        if path is not None and not path.is_file():
            raise UserError(f"{key}={path}: no such file")
    with required_libraries():
        if config.workloads.file is not None or config.workloads.bfcl is not None or config.gates.margins:
            samples = evaluation().load_samples(config.workloads)
            config.gates.check_margins({sample.workload for sample in samples if sample.check != "none"})
        job = Job(config.stage, config.kv, config.weights.format, checkpoint)
        open_loader(config.backend).check_inputs(job)


def _inspect_model(path: Path) -> CheckpointInfo:
    if not path.is_file():
        info = inspect_checkpoint(path)
        check_weights(info)
        return info
    info = inspect_gguf(path).info
    if find_spec("gguf") is None:
        raise MissingRequirement(f"model.path={path}: reading a GGUF takes the package gguf: pip install gguf")
    return info
