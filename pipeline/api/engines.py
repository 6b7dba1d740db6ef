"""`load` opens an engine of any backend that runs here. `champion` verifies and loads the engine that serves."""

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast, get_args, overload

from pipeline.api.calls import path_argument, plan_call, raises_refusals
from pipeline.config.config import Config
from pipeline.evidence.identity import IDENTITY_FILE, read_bundle, read_identity, read_lineage
from pipeline.evidence.reading import bundle_directory, bundle_of
from pipeline.evidence.verify import registered_engines
from pipeline.registry.tracking import NoEngine, locate
from stages.checkpoints.description import inspect_checkpoint
from stages.checkpoints.places import checkpoint_label
from stages.core.errors import GateRefusal, MissingRequirement, UserError, required_libraries, short
from stages.core.records import MemoryReport, Sample
from stages.engines.backend import open_backend
from stages.engines.bundle import BUNDLE_FILE
from stages.engines.config import backend_configs
from stages.engines.interface import Engine
from stages.policies.policy import KVPolicy
from stages.workloads.conversation import Role

Prompt = str | Sequence[Mapping[str, str]]
THREADS = "OMP_NUM_THREADS"
ROLES = get_args(Role)


class LoadedEngine:
    """An engine with its tokenizer. Used as a context manager, it closes at the end of the block."""

    def __init__(self, engine: Engine, tokenizer: Any, bundle: Path, backend: str, longest: int | None) -> None:
        self._engine: Engine | None = engine
        self._longest = longest
        self.downloaded = ExitStack()
        """Temporary directory of an engine that `champion` downloaded. `close` removes the directory."""
        self.tokenizer = tokenizer
        """`stages.evaluate.inputs.tokens.BundleTokenizer`."""
        self.policy: KVPolicy = engine.policy
        """Formats of the engine's KV cache."""
        self.bundle = bundle
        """Directory of the engine."""
        self.backend = backend

    @property
    def engine(self) -> Engine:
        """Engine for prefill and decode of token ids. Raises UserError after `close`."""
        if self._engine is None:
            raise UserError(f"{self.bundle}: this engine was closed; load it again")
        return self._engine

    @overload
    def generate(self, prompt: Prompt, max_new_tokens: int = 64) -> str: ...  # type: ignore[overload-overlap]
    @overload
    def generate(self, prompt: Sequence[Prompt], max_new_tokens: int = 64) -> list[str]: ...
    @raises_refusals
    def generate(self, prompt: Prompt | Sequence[Prompt], max_new_tokens: int = 64) -> str | list[str]:
        """Return the greedy answer to a prompt, or the answers to a list of prompts, which run as one batch.

        Args:
            prompt: A user message, a conversation such as `[{"role": "user", "content": "..."}]`, or a list of prompts. The
                model's chat template renders a prompt. A base model without a template reads lines `user: ...`.
            max_new_tokens: Maximum tokens of an answer.

        Raises:
            UserError: The prompt is invalid, or prompt and answer may exceed the model's maximum length.

        Example:
            >>> engine.generate("Copy:\\n04 Bergen 14 Tartu", max_new_tokens=16)  # doctest: +SKIP
        """
        if type(max_new_tokens) is not int or max_new_tokens < 1:
            raise UserError(f"max_new_tokens={max_new_tokens!r}: must be a whole number of at least 1")
        is_batch = isinstance(prompt, Sequence) and bool(prompt) and isinstance(prompt[0], str | Sequence)
        several: Sequence[Any] = prompt if is_batch and not isinstance(prompt, str) else [prompt]
        tokens = [self._prompt_ids(prompt_item, max_new_tokens) for prompt_item in several]
        generated = self.engine.generate(tokens, max_new_tokens, self.tokenizer.ends)
        answers = [str(self.tokenizer.text(tokens_of_answer)) for tokens_of_answer in generated]
        return answers if several is prompt else answers[0]

    def _prompt_ids(self, prompt: Any, max_new_tokens: int) -> list[int]:
        sample = Sample(id="prompt", workload="custom", reference="", messages=_messages(prompt))
        tokens: list[int] = self.tokenizer.prompt_ids(sample)
        if self._longest is not None and len(tokens) + max_new_tokens > self._longest:
            raise UserError(
                f"max_new_tokens={max_new_tokens}: after a prompt of {len(tokens):,} tokens that is more than the "
                f"{self._longest:,} that the model was made for; shorten one of them"
            )
        return tokens

    @raises_refusals
    def memory(self) -> MemoryReport:
        """Return the bytes of the engine's cache, as allocated."""
        return self.engine.memory()

    def close(self) -> None:
        """Free the engine's memory, end its process if it has a process, and remove any download by `champion`."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()
        self.downloaded.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "" if self._engine is not None else ", closed"
        return f"LoadedEngine({self.policy.name} on {self.backend}{state}: {self.bundle})"


def _messages(prompt: str | Sequence[Mapping[str, str]]) -> tuple[tuple[str, str], ...]:
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not isinstance(messages, Sequence) or isinstance(messages, bytes) or not messages:
        raise UserError(f"prompt: {prompt!r} is not a prompt; give a text, or a conversation")
    for message in messages:
        known = isinstance(message, Mapping) and set(message) == {"role", "content"} and message["role"] in ROLES
        if not known or not isinstance(message["content"], str):
            fix = f'give {{"role": "user", "content": "..."}} with a role of {", ".join(ROLES)}, and no other keys'
            raise UserError(f"prompt: {short(repr(message), 200)} is not a message; {fix}")
        if any("\ud800" <= letter <= "\udfff" for letter in message["content"]):
            raise UserError("prompt: holds half of a surrogate pair, which is not text; correct it")
    return tuple((message["role"], message["content"]) for message in messages)


@raises_refusals
def load(bundle: str | Path, *, threads: int | None = None, **overrides: object) -> LoadedEngine:
    """Load a built or judged engine of any backend that this machine can run.

    Args:
        bundle: An engine's directory, as stage=build prints it, or a copy of an engine with its evidence.
        threads: CPU threads. By default OMP_NUM_THREADS, or this machine's physical cores.
        overrides: Other keys of `backend=`, such as `**{"backend.attention": "graph"}`.

    Raises:
        UserError: The directory contains no engine, or a file is missing or was altered.
        MissingRequirement: This machine cannot run the engine.

    Example:
        >>> with load("work/artifacts/build/KEY") as engine:  # doctest: +SKIP
        ...     print(engine.generate("What is 2 + 2?"))
    """
    strange = next((key for key in overrides if not key.startswith("backend.")), None)
    if strange is not None:
        raise UserError(f"{strange}={overrides[strange]}: an engine is loaded as it was built; give keys of backend.* alone")
    directory = _engine_directory(bundle_directory(str(path_argument("bundle", bundle))))
    record = read_bundle(directory)
    name = record.get("backend")
    values: dict[str, object] = {"stage": "build", "backend": name}
    described = backend_configs().get(str(name))
    if threads is not None or (described is not None and described.in_process):
        threads_text = os.environ.get(THREADS, "")
        usual = int(threads_text) or None if threads_text.isascii() and threads_text.isdigit() else None
        values["backend.threads"] = threads if threads is not None else usual
    (config,) = plan_call({**values, **overrides}).jobs
    with required_libraries():
        from stages.evaluate.inputs.tokens import BundleTokenizer

        backend = open_backend(config.backend)
        return LoadedEngine(
            backend.load(directory), BundleTokenizer(directory), directory, str(name), _longest(directory, record)
        )


def _engine_directory(directory: Path) -> Path:
    """Return the engine's directory, given the engine itself, a copy with its evidence, or evidence in a store."""
    if not (directory / IDENTITY_FILE).is_file():
        if (directory / BUNDLE_FILE).is_file():
            return directory
        raise UserError(f"bundle={directory}: holds neither {BUNDLE_FILE} nor {IDENTITY_FILE}; give an engine's directory")
    engine = bundle_of(directory, "engine", read_lineage(directory / IDENTITY_FILE))
    if engine is None:
        raise MissingRequirement(f"bundle={directory}: holds the evidence without the engine; copy it to engine/ there")
    return engine


def _longest(directory: Path, record: Mapping[str, Any]) -> int | None:
    """Return the model's maximum sequence length, or None if the bundle does not record it and the engine itself checks it."""
    described = record.get("model")
    if isinstance(described, dict):
        return described.get("max_position_embeddings")
    return inspect_checkpoint(directory).max_positions if (directory / "config.json").is_file() else None


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
    (config,) = plan_call(settings).jobs
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
        raise UserError(f"{location} cannot be used: its file is missing or empty; give the store that a promotion wrote to")
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
