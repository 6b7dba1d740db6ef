"""Optional capabilities of engines, as protocols: an engine has a capability if it defines its method.

Check `isinstance(engine, SupportsFork)` before a call of `engine.fork`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from stages.core.records import Drafting, LoadTimes, Pressed, StoredCopy
from stages.policies.policy import Side
from stages.policies.scales import LayerDelivery

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Logits = npt.NDArray[np.float32]

ForcedRequest = tuple[Sequence[int], int]
"""(tokens, first): tokens[:first] is the prompt, and the tokens from `first` on are decoded."""


@runtime_checkable
class SupportsFork(Protocol):
    def fork(self, sequence: int) -> int:
        """Start a sequence with the same tokens that shares the original's full pages, and return its handle."""
        ...


@runtime_checkable
class SupportsExtend(Protocol):
    def extend(self, sequence: int, tokens: Sequence[int]) -> Logits:
        """Append prompt tokens to a sequence as a later chunk of its prefill; return the last token's logits (vocab_size,)."""
        ...


@runtime_checkable
class SupportsForgetting(Protocol):
    def forget_prefixes(self) -> None:
        """Drop the prompt prefixes that the cache keeps for later prompts."""
        ...


@runtime_checkable
class SupportsForced(Protocol):
    def forced(self, tokens: Sequence[int], first: int) -> Logits:
        """Compute the forced decode of a whole sequence in one pass; no sequence stays in the engine.

        Return logits (len(tokens) - first, vocab_size). Row r equals the result of `decode` for tokens[first + r] after
        `prefill` of tokens[:first] and `decode` of the tokens between. Raises UserError if `tokens` is empty or holds ids
        outside the vocabulary; ValueError if `first` leaves an empty prefix or no token to score.
        """
        ...


@runtime_checkable
class SupportsRequests(Protocol):
    """An engine that serves whole requests and batches them by itself."""

    def forced_together(self, requests: Sequence[ForcedRequest]) -> list[Logits]:
        """Return the logits of `SupportsForced.forced` for each request, with all requests in flight at once."""
        ...


@runtime_checkable
class SupportsReuse(SupportsRequests, Protocol):
    def forced_reusing(self, requests: Sequence[ForcedRequest]) -> list[Logits]:
        """Return the same logits as `forced_together`; every prefix comes from the cache of earlier requests."""
        ...


@runtime_checkable
class SupportsDrafting(Protocol):
    def drafting(self, requests: Sequence[tuple[Sequence[int], int]], tokens: int, ngram: int) -> Drafting:
        """Answer each (prompt, number of tokens) greedily, with the engine's own prompt lookup.

        The lookup matches at most the last `ngram` tokens and proposes at most `tokens` tokens.
        """
        ...


@runtime_checkable
class SupportsPressure(Protocol):
    def press(self, rounds: Sequence[Sequence[ForcedRequest]], rows: int, pages: int | None = None) -> list[list[Pressed]]:
        """Serve rounds of requests. The requests of a round are sent at once.

        A request's result includes the logits of its last `rows` tokens. With `pages`, all rounds share a pool of that
        number of pages of PAGE_TOKENS tokens, which keeps prompt prefixes: requests wait, are preempted by older requests, and
        are recomputed. Without `pages`, every request has room and no prefix is reused.
        """
        ...


@runtime_checkable
class SupportsStored(Protocol):
    def stored(self, sequence: int) -> Sequence[Mapping[Side, StoredCopy]]:
        """Return, for each layer, the copies in the pages of a sequence, without the buffers of exact tokens."""
        ...


@runtime_checkable
class SupportsStoredRequest(Protocol):
    def stored_request(self, number: int) -> Sequence[Mapping[Side, StoredCopy]]:
        """Return the cache content of request `number` of the last `forced_together`, in the form of `stored`.

        The result is empty if the engine cannot describe the memory layout of its cache.
        """
        ...


@runtime_checkable
class SupportsDelivery(Protocol):
    def delivery(self) -> Sequence[LayerDelivery]:
        """Return, by layer, the scales that another library's engine loaded from its checkpoint."""
        ...


@runtime_checkable
class SupportsTiming(Protocol):
    """An engine that serves whole requests, whose steps cannot be timed from outside."""

    def timed(self, prompts: Sequence[Sequence[int]], steps: int) -> LoadTimes:
        """Time `steps` decode steps after the first token of every prompt."""
        ...
