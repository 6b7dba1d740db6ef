"""The checks that come before any work: files that the configuration names, the policy, what the backend needs."""

from importlib.util import find_spec
from pathlib import Path

from pipeline.artifacts.backend import Job
from pipeline.artifacts.store import check_store
from pipeline.config.config import Config
from pipeline.config.policies import tuned_policies
from pipeline.core.backends import OpenAIConfig
from pipeline.core.checkpoint import CheckpointInfo, inspect_checkpoint, locate_checkpoint
from pipeline.core.checkpoint_weights import check_weights
from pipeline.core.errors import MissingRequirement, UserError
from pipeline.gguf.model import inspect_gguf
from pipeline.gguf.vocabulary import UNUSED
from pipeline.planning.capacity import memory_budget
from pipeline.planning.shapes import read_model
from pipeline.registry import summary
from pipeline.routing.files import read_routing_file, read_snapshot
from pipeline.run.loading import evaluation, open_loader, required_libraries
from pipeline.trust.binding import read_policy
from pipeline.trust.keys import load_keys

WITHOUT_CHECKPOINT = ("promote", "rollback", "verify", "route", "monitor")
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
    load_keys(config.signing)
    read_policy(config.promote)
    if config.stage != "verify":
        check_store(config.work / "artifacts")
        summary.load(config.work)  # every other stage writes to it; a file that it cannot write to is refused before the work
    if config.stage == "verify" and not Path(str(config.bundle)).is_dir():
        raise UserError(f"bundle={config.bundle}: no such directory")
    if config.stage == "route" and config.routing.file is not None:
        read_routing_file(config.routing)
    if config.stage == "monitor":
        read_snapshot(config.monitor)
    if config.stage in WITHOUT_CHECKPOINT:
        return
    if config.stage in PLANNING:
        memory_budget(read_model(locate_checkpoint(config.model.path)), config.capacity, config.weights.format)
        return
    checkpoint = _inspect_model(locate_checkpoint(config.model.path))
    config.kv.check_shape(checkpoint.shape)
    if config.stage == "tune":
        tuned_policies(config, checkpoint.shape)
    with required_libraries():
        _check_questions(config)
        job = Job(config.stage, config.kv, config.weights.format, checkpoint)
        open_loader(config.backend).check_inputs(job)


def _check_questions(config: Config) -> None:
    """Check the files and options of what is calibrated on and asked."""
    for key, path in (("calibration.jsonl", config.calibration.file), ("workloads.jsonl", config.workloads.file)):
        if path is not None and not path.is_file():
            raise UserError(f"{key}={path}: no such file")
    speculation = config.workloads.speculation
    if speculation is not None and isinstance(config.backend, OpenAIConfig):
        raise UserError("workloads.speculation: a server drafts as it was started to; leave it null with backend=openai")
    if speculation is not None and speculation.draft is not None:
        check_draft(speculation.draft, locate_checkpoint(config.model.path))
    if config.workloads.file is not None or config.workloads.bfcl is not None or config.gates.margins:
        samples = evaluation().load_samples(config.workloads)
        config.gates.check_margins({sample.workload for sample in samples if sample.check != "none"})


def _inspect_model(path: Path) -> CheckpointInfo:
    if not path.is_file():
        info = inspect_checkpoint(path)
        check_weights(info)
        return info
    info = inspect_gguf(path).info
    if find_spec("gguf") is None:
        raise MissingRequirement(f"model.path={path}: reading a GGUF takes the package gguf: pip install gguf")
    return info


def check_draft(path: str, target: Path) -> None:
    """Check that a draft checkpoint can be read, and that it has the target's tokens.

    Args:
        path: `workloads.speculation.draft`.
        target: The checkpoint of `model.path`, or its GGUF.
    """
    key = "workloads.speculation.draft="
    try:
        draft = locate_checkpoint(path)
        if draft.is_file():
            raise UserError(f"{key}{path}: is a file; give the directory of a Hugging Face checkpoint")
        check_weights(inspect_checkpoint(draft))
    except UserError as error:
        raise UserError(str(error).replace("model.path=", key)) from None
    wanted, unused = _vocabulary(target, f"model.path={target}")
    offered, _ = _vocabulary(draft, f"{key}{path}")
    tokens = (wanted | offered).keys() - unused
    different = next((token for token in sorted(tokens) if wanted.get(token) != offered.get(token)), None)
    if different is not None:
        ids = [f"token {known[different]}" if different in known else "no token" for known in (offered, wanted)]
        raise UserError(
            f"{key}{path}: its tokenizer is another one than model.path's: {different!r} is {ids[0]} there and {ids[1]} of "
            "the target; give a draft with the same tokenizer"
        )


def _vocabulary(path: Path, named: str) -> tuple[dict[str, int], set[str]]:
    """Return the tokens of a checkpoint or a GGUF with their ids, and those that a GGUF only fills its list up with."""
    if path.is_file():
        listed = inspect_gguf(path).vocabulary
        unused = {token for token, kind in zip(listed.tokens, listed.types, strict=True) if kind == UNUSED}
        return {token: number for number, token in enumerate(listed.tokens)}, unused
    try:
        return evaluation().vocabulary(path), set()
    except Exception as error:  # tokenizers raises bare exceptions
        detail = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UserError(f"{named}: its tokenizer cannot be loaded ({detail})") from error
