"""`champion`: finds the serving engine in the registry, verifies and loads it."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import cast

from pipeline.api.calls import compose, path_argument, raises_refusals
from pipeline.api.engines import LoadedEngine, load
from pipeline.config.config import Config
from pipeline.evidence.identity import read_identity
from pipeline.evidence.verify import registered_engines
from pipeline.registry.tracking import NoEngine, locate
from stages.checkpoints.places import checkpoint_label
from stages.core.errors import GateRefusal, MissingRequirement, UserError


@raises_refusals
def champion(
    model: str | Path,
    *,
    tracking_uri: str | None = None,
    workdir: str | Path = "work",
    samples: str | Path | None = None,
    trusted: str | Path | Sequence[str | Path] = (),
    threads: int | None = None,
) -> LoadedEngine:
    """Fetch the engine that the registry's alias `champion` names, verify it as stage=verify does, and load it.

    The engine is read from the work directory if it is still there, and downloaded from the registry otherwise.

    Args:
        model: The registered model's name, or the checkpoint that it is named after.
        tracking_uri: MLflow's store. By default MLFLOW_TRACKING_URI, or the store in the work directory.
        workdir: The work directory.
        samples: The `workloads.jsonl` file or the `workloads.documents` directory that the engine was judged on, if any. A
            downloaded engine needs it, because the registry keeps the digest but not the prompts.
        trusted: PEM files of public keys, or one such file. If given, the evidence must be signed with one of these keys.
        threads: CPU threads, as for `load`.

    Raises:
        UserError: The model does not exist or has no champion.
        GateRefusal: The engine or its evidence differs from the judged state.
        MissingRequirement: This machine lacks something to fetch, verify or run the engine.

    Example:
        >>> champion("tiny").generate("Copy:\\n04 Bergen 14 Tartu")  # doctest: +SKIP
    """
    if not isinstance(model, str | Path):
        raise UserError(f"model={model!r}: is not a model; give the registered one, or the checkpoint")
    if not isinstance(trusted, str | Path | Sequence):
        raise UserError(f"trusted={trusted!r}: is not a list of files; give the files of public keys, or leave it out")
    # The configuration of a command that only reads.
    settings: dict[str, object] = {"stage": "verify", "bundle": ".", "workdir": workdir, "tracking.uri": tracking_uri}
    settings["signing.trusted"] = [trusted] if isinstance(trusted, str | Path) else list(trusted)
    if samples is not None:
        path = path_argument("samples", samples)
        kind = "documents" if path.is_dir() else "jsonl"
        settings |= {"workloads": kind, f"workloads.{kind}": path}
    config = compose(settings)
    with ExitStack() as stack:
        loaded = load(_fetch_verified(config, str(model), stack), threads=threads)
        loaded.downloaded = stack.pop_all()
    return loaded


def _fetch_verified(config: Config, model: str, stack: ExitStack) -> Path:
    """Return the champion's engine. A downloaded engine is removed when `stack` closes."""
    from pipeline.registry.mlflow_store import MlflowStore, RegistryReader

    config.signing.check()
    location = locate(config.tracking, config.work, checkpoint_label(model))
    # MLflow refuses names with / or :, such as the path of a checkpoint.
    names = [name for name in dict.fromkeys([model, location.model_name]) if not {"/", ":"} & set(name)]
    if not location.exists:
        raise UserError(f"{location} cannot be used: there is no such file; give the store that a promotion wrote to")
    reader = RegistryReader(location)
    version = reader.champion(names)
    if version is None:
        raise UserError(f"model={model}: the registry has no champion of {' or '.join(names)}; promote one, or give another")
    engines = stack.enter_context(registered_engines(cast(MlflowStore, reader), config, decides=False))
    try:
        champion = engines.find(version, fetched=True)
        asked = read_identity(champion.candidate.identity.path).workloads_file
        if config.workloads.user_path is not None and asked is None:
            raise UserError(
                f"samples={config.workloads.user_path}: the champion was judged on generated samples alone; leave it out"
            )
        champion.verify()
    except (GateRefusal, MissingRequirement) as error:
        kind = MissingRequirement if isinstance(error, NoEngine) else type(error)
        raise kind(f"the champion of {model}, {version}: {error}") from error
    return champion.candidate.engine.path
