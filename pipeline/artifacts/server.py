"""What the pipeline asks of a backend that builds nothing, and is given servers by URL; and what a server shows."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, Protocol

from pipeline.artifacts.backend import Loader
from pipeline.core.kv import KVPolicy

ServerRole = Literal["candidate", "baseline", "canary"]
"""The engine that is judged, the one with a 16-bit cache that it is compared with, and one whose cache is corrupted."""


@dataclass(frozen=True)
class Shown:
    """What a server shows of one next-token distribution."""

    logp: Mapping[int, float]
    """Natural log-probabilities of its most likely tokens, and of the forced one."""
    prompt_tokens: int
    cached_tokens: int | None
    """Tokens of the prompt that came from the prefix cache; None where the server does not say."""


@dataclass(frozen=True)
class ServedTimes:
    """Times of one load, as a client sees them: queueing, HTTP and JSON are part of them."""

    first_token_ms: list[float]
    """Time to the first token of each prompt, asked alone, one after the other."""
    tokens_per_s: float | None
    """Decoded by all prompts together; None where too few came to tell."""


class ServedEngine(Protocol):
    """A server that was recorded. Its requests may come from several threads.

    Raises:
        MissingRequirement: from every request, when the server is gone, does not answer in time, or fails.
    """

    url: str
    model: str
    """The name by which it serves the model."""
    release: str
    """Empty where the server does not say."""
    says: dict[str, str]
    """What it says of its cache."""
    top_logprobs: int
    policy: KVPolicy
    """What the configuration says of its cache; nothing of a server shows it."""
    vocab_size: int

    def forced(self, prompt: Sequence[int], token: int) -> Shown:
        """Return what the server shows of the distribution after `prompt`, in a request that makes it say `token`."""
        ...

    def answer(self, prompt: Sequence[int], max_new_tokens: int, stop_token: int) -> list[int]:
        """Return a greedy continuation without the stop token, in one request: it goes through the server's decode path."""
        ...

    def timed(self, prompts: Sequence[Sequence[int]], steps: int) -> ServedTimes:
        """Return the times of `steps` more tokens after the first one of every prompt."""
        ...


class Server(Loader):
    """Judges engines that run elsewhere. What stands for one is a small artifact: what it says, and the tokenizer."""

    server_module: ClassVar[str]
    """Module that records servers: its source, with all that it can import, is part of a record's key."""

    @abstractmethod
    def facts(self, role: ServerRole) -> dict[str, object] | None:
        """Return what a server says of itself, as JSON: part of its record's key; None where no such server was given.

        Raises:
            UserError: for a server that is not what the configuration says.
            MissingRequirement: for one that does not answer.
        """

    @abstractmethod
    def record(self, facts: Mapping[str, object], checkpoint: Path, out: Path, *, policy: KVPolicy) -> None:
        """Check that a server can be judged, and fill the empty directory `out` with what stands for it.

        Args:
            facts: What it says of itself.
            checkpoint: The model that it is said to serve.
            out: Receives `bundle.json`, the policy and the tokenizer.
            policy: The policy that its cache is said to have.

        Raises:
            UserError: for a server of another model or tokenizer, or one that reuses no prefixes.
            MissingRequirement: for one that shows too little, or does not answer.
        """

    @abstractmethod
    def connect(self, recorded: Path) -> ServedEngine:
        """Return a server that `record` recorded. Raises UserError when a file of the record was altered."""
