"""The interface of engines: required methods, greedy generation and optional capabilities.

Optional capabilities are protocols: an engine has a capability if it defines its methods. Check
`isinstance(engine, SupportsFork)` before a call of `engine.fork`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

from stages.core.errors import UserError
from stages.core.records import PREFILL_CHUNK, LoadTimes, MemoryReport, ServedRequest, StoredCopy
from stages.policies.policy import KVPolicy, KVShape, Side
from stages.policies.scales import LayerDelivery

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Logits: TypeAlias = "npt.NDArray[np.float32]"  # in quotes, so that a command starts without NumPy

LOGITS_NOT_FINITE = "not finite: check the checkpoint for NaN or infinite weights, and whether keys or values overflow float16"


@dataclass(eq=False)
class Continuation:
    """A request of `generate` and its progress."""

    tokens: list[int]
    """The prompt, followed by the generated tokens."""
    prompt_tokens: int
    most_tokens: int
    """Maximum length in tokens, prompt included."""
    sequence: int = -1
    """Handle of its sequence; -1 before the start and after a preemption."""
    stored: int = 0
    """Tokens whose keys and values are in the cache."""
    reached: int = 0
    """Tokens that were stored when the request was last preempted."""
    preempted: int = 0


class Engine(ABC):
    """A loaded engine bundle. Sequences are integer handles; logits are float32 of shape (batch, vocab_size).

    A subclass implements the abstract methods. The public methods check their arguments, so that methods starting with `_` may
    rely on valid input.
    """

    prefill_chunk: int = PREFILL_CHUNK
    """Tokens of one prefill run. A longer prompt attends to its earlier chunks through the quantized cache."""
    max_sequences: int | None = None
    """Maximum number of sequences at once; None if only memory limits them."""
    max_tokens: int | None = None
    """Maximum tokens per sequence that the engine was built for."""
    max_batch: int | None = None
    """Maximum sequences per decode step that the engine was built for."""
    attention: str | None = None
    """Description of the decode attention, if the engine can choose between several implementations."""
    reads_itself: bool = False
    """Whether attention reads every key and value from the quantized cache, also in prompts and for the current token."""
    logit_step: float = 0.0
    """Largest spacing of the logits in the engine's type, relative to the logit; 0 if it is negligible."""
    full_pool_requests: int = 0
    """Requests that an evaluation serves from a small pool (`serve_rounds`) if `workloads.full_pool` is null."""

    def __init__(self, policy: KVPolicy, shape: KVShape, vocab_size: int) -> None:
        self.policy, self.shape, self.vocab_size = policy, shape, vocab_size

    def prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[list[int], Logits]:
        """Start one sequence for each prompt.

        Return the sequences' handles and the logits (len(prompts), vocab_size) after every prompt. Unless the engine
        `reads_itself`, a prompt of at most `prefill_chunk` tokens does not read the quantized cache. Raises UserError if a
        prompt is empty, has ids outside the vocabulary, or does not fit into the engine; then no sequence is started.
        """
        for prompt in prompts:
            check_tokens(prompt, self.vocab_size)
        return self._prefill_batch(prompts)

    def decode(self, sequences: Sequence[int], tokens: Sequence[int]) -> Logits:
        """Append one token to each sequence.

        Return logits (len(sequences), vocab_size), computed from the quantized cache. Raises UserError if a token is outside
        the vocabulary or does not fit into the engine; ValueError unless the sequences are distinct and each gets one token.
        """
        if len(sequences) != len(tokens) or len(set(sequences)) != len(sequences):
            raise ValueError(f"decode takes one token for each of distinct sequences, got {sequences} and {tokens}")
        check_tokens(tokens, self.vocab_size)
        return self._decode(sequences, tokens)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int | Sequence[int],
        stop_tokens: Collection[int],
        *,
        max_sequences: int | None = None,
        ended: Callable[[Sequence[Continuation]], None] = lambda _: None,
    ) -> list[list[int]]:
        """Return greedy continuations, in the order of the prompts. A continuation ends before its first stop token.

        A finished sequence is released at once, and the next prompt takes its slot. At most `max_sequences` sequences are
        active at once, and never more than the engine supports. `ended` is called with requests that have just finished,
        before their sequences are released.

        Raises UserError before any prompt starts if a prompt is empty or has ids outside the vocabulary, and later if a prompt
        does not fit into the engine or logits are not finite, since no token can be picked. `prefill` and `decode` return such
        logits because an evaluation counts them.
        """
        limits = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else list(max_new_tokens)
        if len(limits) != len(prompts) or min(limits, default=1) < 1:
            raise UserError(f"max_new_tokens must be at least 1 for each of {len(prompts)} prompts, got {limits}")
        if max_sequences is not None and max_sequences < 1:
            raise UserError(f"max_sequences must be at least 1, got {max_sequences}")
        for prompt in prompts:
            check_tokens(prompt, self.vocab_size)
        continuations = [
            Continuation(list(prompt), len(prompt), len(prompt) + limit) for prompt, limit in zip(prompts, limits, strict=True)
        ]
        limit = min(most for most in (max_sequences, self.max_sequences, max(1, len(prompts))) if most is not None)
        self._answer(continuations, stop_tokens, limit, ended)
        return [request.tokens[request.prompt_tokens :] for request in continuations]

    def _answer(
        self,
        continuations: Sequence[Continuation],
        stop_tokens: Collection[int],
        max_sequences: int,
        on_end: Callable[[Sequence[Continuation]], None],
    ) -> None:
        """Generate until every request has ended, at most `max_sequences` at once."""
        import numpy as np  # imported here, so that the command line starts without NumPy

        waiting, live = deque(continuations), list[Continuation]()
        try:
            while waiting or live:
                while waiting and len(live) < max_sequences:
                    live.append(waiting.popleft())
                advanced, logits = self._advance(live)
                broken = np.flatnonzero(~np.isfinite(logits).all(-1))
                if broken.size:
                    request = advanced[int(broken[0])]
                    raise UserError(
                        f"logits of sequence {request.sequence} after {len(request.tokens)} tokens are {LOGITS_NOT_FINITE}"
                    )
                ended = []
                for request, token in zip(advanced, logits.argmax(-1).tolist(), strict=True):
                    if token not in stop_tokens:
                        request.tokens.append(token)
                    if token in stop_tokens or len(request.tokens) == request.most_tokens:
                        ended.append(request)
                if ended:
                    on_end(ended)
                live = [request for request in live if request not in ended]
                self._release_all(ended)
        finally:
            self._release_all(live)

    def _advance(self, live: Sequence[Continuation]) -> tuple[Sequence[Continuation], Logits]:
        """Take one step: prefill the continuations without a sequence or, if all have a sequence, decode.

        An engine that prefills and decodes in one pass overrides this method. Return the continuations whose tokens are all
        stored, and the logits (continuations, vocab_size) of their last tokens.
        """
        joining = [request for request in live if request.sequence < 0]
        if joining:
            return joining, self._prefill_requests(joining)
        logits = self.decode([request.sequence for request in live], [request.tokens[-1] for request in live])
        for request in live:
            request.stored += 1
        return live, logits

    def _prefill_requests(self, joining: Sequence[Continuation]) -> Logits:
        handles, logits = self.prefill([request.tokens[: request.prompt_tokens] for request in joining])
        for request, handle in zip(joining, handles, strict=True):
            request.sequence, request.stored = handle, request.prompt_tokens
        return logits

    def _release_all(self, continuations: Sequence[Continuation]) -> None:
        self.release([request.sequence for request in continuations if request.sequence >= 0])

    def release(self, sequences: Sequence[int]) -> None:
        """Free the memory of the sequences and invalidate their handles."""
        for sequence in sequences:
            self._release(sequence)

    def close(self) -> None:  # noqa: B027  (most engines hold nothing but memory)
        """Stop the engine's own process, if it runs in one."""

    @abstractmethod
    def memory(self) -> MemoryReport:
        """Return the allocated bytes and pages of the cache, and its number of tokens."""

    @abstractmethod
    def _prefill_batch(self, prompts: Sequence[Sequence[int]]) -> tuple[list[int], Logits]:
        """Implement `prefill` for prompts that passed the checks."""

    @abstractmethod
    def _decode(self, sequences: Sequence[int], tokens: Sequence[int]) -> Logits:
        """Implement `decode` for arguments that passed the checks."""

    @abstractmethod
    def _release(self, sequence: int) -> None:
        """Free the memory of one sequence."""

    @abstractmethod
    def corrupt_key_scale(self, factor: float) -> None:
        """Plant the must-fail control's fault: multiply the key scales that decoding reads, or keys that have no scale.

        The fault applies to stored and to later tokens. Codes that have a scale do not change. The inverse factor removes the
        fault.
        """

    def _check_forced(self, tokens: Sequence[int], first: int) -> None:
        check_tokens(tokens, self.vocab_size)
        if not 0 < first < len(tokens):
            raise ValueError(f"first must be 1 to {len(tokens) - 1}, got {first}")


def check_tokens(tokens: Sequence[int], vocab_size: int) -> None:
    if not len(tokens):
        raise UserError("a prompt must have at least one token, got none")
    if min(tokens) < 0 or max(tokens) >= vocab_size:
        raise UserError(f"token ids must be in [0, {vocab_size}), got {min(tokens)} to {max(tokens)}")


ForcedRequest = tuple[Sequence[int], int]
"""(tokens, first): tokens[:first] is the prompt, and the tokens from `first` on are decoded."""


@runtime_checkable
class SupportsFork(Protocol):
    """An engine whose live sequences can be forked, and extended by another chunk of a prompt."""

    def fork(self, sequence: int) -> int:
        """Start a copy of a sequence, which shares the original's full pages, and return its handle."""
        ...

    def extend(self, sequence: int, tokens: Sequence[int]) -> Logits:
        """Append prompt tokens to a sequence as a later chunk of its prefill; return the last token's logits (vocab_size,)."""
        ...


@runtime_checkable
class SupportsForced(Protocol):
    def forced(self, tokens: Sequence[int], first: int) -> Logits:
        """Compute the forced decode of a whole sequence in one pass. The engine keeps no sequence.

        Return logits (len(tokens) - first, vocab_size). Row r equals what `decode` returns for tokens[first + r] after
        `prefill` of tokens[:first] and `decode` of the tokens between. Raises UserError if `tokens` is empty or holds ids
        outside the vocabulary; ValueError if `first` leaves an empty prefix or no token to score.
        """
        ...


@runtime_checkable
class SupportsRequests(Protocol):
    """An engine that serves whole requests and batches them by itself, so that only it can time its decode steps."""

    def forced_together(self, requests: Sequence[ForcedRequest]) -> list[Logits]:
        """Return the logits of `SupportsForced.forced` for each request, with all requests in flight at once."""
        ...

    def timed(self, prompts: Sequence[Sequence[int]], steps: int) -> LoadTimes:
        """Time `steps` decode steps after the first token of every prompt."""
        ...


@runtime_checkable
class SupportsFullPool(Protocol):
    def serve_rounds(
        self, rounds: Sequence[Sequence[ForcedRequest]], rows: int, pages: int | None = None
    ) -> list[list[ServedRequest]]:
        """Serve rounds of requests. All requests of a round arrive at once.

        A result includes the logits of the request's last `rows` tokens. With `pages`, all rounds share a pool with that
        many pages of PAGE_TOKENS tokens: requests wait, are preempted by older requests, and are recomputed. vLLM also
        reuses prompt prefixes there. Without `pages`, every request has room and no prefix is reused.
        """
        ...


@runtime_checkable
class SupportsStored(Protocol):
    def stored(self, sequence: int) -> Sequence[Mapping[Side, StoredCopy]]:
        """Return the codes and scales in a sequence's pages, by layer, without buffers of exact tokens."""
        ...


@runtime_checkable
class SupportsStoredRequest(Protocol):
    def stored_request(self, number: int) -> Sequence[Mapping[Side, StoredCopy]]:
        """Return the cache content of request `number` of the last `forced_together`, in the form of `stored`.

        The result is empty if the memory layout of the engine's cache is unknown.
        """
        ...


@runtime_checkable
class SupportsDelivery(Protocol):
    def delivery(self) -> Sequence[LayerDelivery]:
        """Return, by layer, the scales in the checkpoint and the scales that the library's engine uses."""
        ...
