"""`champion`: finds the serving engine in the registry, verifies and loads it."""

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from pipeline.api.calls import compose, path_argument, raises_refusals
from pipeline.api.engines import LoadedEngine, load
from pipeline.config.config import Config
from pipeline.evidence.findings import require_same
from pipeline.evidence.reading import Evidence, download_evidence, identities, registered_evidence, write_questions
from pipeline.evidence.verify import replay
from pipeline.registry.tracking import locate
from stages.checkpoints.places import checkpoint_label
from stages.core.errors import GateRefusal, MissingRequirement, UserError
from stages.workloads.user_files import user_content


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
    samples_path = None if samples is None else path_argument("samples", samples)
    if not isinstance(trusted, str | Path | Sequence):
        raise UserError(f"trusted={trusted!r}: is not a list of files; give the files of public keys, or leave it out")
    # The configuration of a command that only reads.
    settings = {"stage": "verify", "bundle": ".", "workdir": workdir, "tracking.uri": tracking_uri}
    config = compose({**settings, "signing.trusted": [trusted] if isinstance(trusted, str | Path) else list(trusted)})
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvgate-")))
        loaded = load(_fetch_verified(config, str(model), scratch, samples_path), threads=threads)
        loaded.downloaded = stack.pop_all()
    return loaded


def _fetch_verified(config: Config, model: str, scratch: Path, samples: Path | None) -> Path:
    from pipeline.registry.mlflow_store import RegistryReader

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
    champion_name, why = f"version {version.number}, the champion of {model}", ""
    evidence: Evidence | None = None
    try:
        evidence = registered_evidence(identities(config.artifacts), version)
    except GateRefusal as error:  # another work directory judged it, or an older kvgate
        why = f" ({error})"
    if evidence is None or evidence.engine is None:
        try:
            evidence = download_evidence(reader, version, scratch)
        except GateRefusal as error:
            raise GateRefusal(f"the champion of {model}, {error}") from error
        copy = evidence.directory
        if not (copy / "engine").is_dir():
            raise MissingRequirement(
                f"{champion_name}, has no engine in the registry and none in {config.work}{why}: register it with "
                "tracking.log_bundle=true, or give the workdir that judged it"
            )
        if samples is not None and evidence.workloads_file is not None:  # where the evidence expects them
            write_questions(evidence.workloads_file, user_content("samples", samples))
    if samples is not None and evidence.workloads_file is None:
        raise UserError(f"samples={samples}: the champion was judged on generated samples alone; leave it out")
    require_same(champion_name, replay(evidence, config.signing))
    assert evidence.engine is not None, "a replay without the engine is missing something"
    return evidence.engine
