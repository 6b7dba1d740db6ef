"""`load`: opens an engine of any backend that runs here and generates answers."""

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self, get_args, overload

from pipeline.api.calls import compose, path_argument, raises_refusals
from pipeline.evidence.identity import IDENTITY_FILE, read_bundle, read_lineage
from pipeline.evidence.reading import bundle_directory, bundle_of
from stages.checkpoints.description import inspect_checkpoint
from stages.core.errors import MissingRequirement, UserError, required_libraries, short
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
    config = compose({**values, **overrides})
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
