"""The engine: what every one does, what some can do besides, and greedy generation over it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.core.errors import UserError
from pipeline.core.kv import KVPolicy, KVShape, Side
from pipeline.core.records import PREFILL_CHUNK, Drafting, LayerDelivery, LoadTimes, MemoryReport, Pressed, StoredCopy

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Logits = npt.NDArray[np.float32]

NOT_FINITE = "not finite: check the checkpoint for NaN or infinite weights, and whether keys or values overflow float16"


@dataclass(eq=False)
class Continuation:
    """A prompt of `generate`, and how far it has come."""

    tokens: list[int]
    """The prompt, then its continuation."""
    prompt_tokens: int
    most_tokens: int
    """Tokens of the prompt and of the longest continuation that is asked for."""
    sequence: int = -1
    """Handle of its sequence; -1 before it is started, and after it gave way."""
    stored: int = 0
    reached: int = 0
    """Tokens that it had stored when it last gave way."""
    preempted: int = 0
    """How often it gave way to older ones."""
    reused: int = 0
    """Tokens of its prompt that were found in the cache."""


class Engine(ABC):
    """A loaded engine bundle. Sequences are integer handles; logits are float32 of shape (batch, vocab_size).

    A subclass implements the methods that begin with `_`; the public methods check their arguments, so that the others may rely
    on them. The methods after `can` are capabilities: a subclass has those that it overrides.
    """

    prefill_chunk: int = PREFILL_CHUNK
    max_sequences: int | None = None
    """Most sequences that may live at once; None where only memory limits them."""
    max_tokens: int | None = None
    """Most tokens of a sequence that the engine was built for."""
    max_batch: int | None = None
    """Most sequences of a decode step that the engine was built for."""
    threads: int | None = None
    """CPU threads that it was told to compute with."""
    attention: str | None = None
    """What computes its decode attention, where that may be one of several."""
    reads_itself: bool = False
    """Whether every token reads the cache alone, its own key and value included, in prompts as well."""
    logit_step: float = 0.0
    """Two units in the last place of a logit, relative to it."""
    pressed_requests: int = 0
    """Requests that an evaluation presses into a small pool (`press`) where `workloads.pressure` says nothing."""
    keeps_prefixes: bool = False
    """Whether beginnings of prompts stay in its cache for later prompts, until `forget_prefixes`."""

    def __init__(self, policy: KVPolicy, shape: KVShape, vocab_size: int) -> None:
        self.policy, self.shape, self.vocab_size = policy, shape, vocab_size

    def prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[list[int], Logits]:
        """Start one sequence for each prompt.

        Return the sequences' handles, and logits (len(prompts), vocab_size) of each prompt's last token. Those of a prompt of
        at most PREFILL_CHUNK tokens do not read the quantized cache. Raises UserError where a prompt is empty or has ids
        outside the vocabulary, or the engine cannot hold it. No sequence is started then.
        """
        for prompt in prompts:
            check_tokens(prompt, self.vocab_size)
        return self._prefill_batch(prompts)

    def begin(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        """As `prefill`, where nobody asks for the logits."""
        return self.prefill(prompts)[0]

    def decode(self, sequences: Sequence[int], tokens: Sequence[int]) -> Logits:
        """Append one token to each of distinct sequences.

        Return logits (len(sequences), vocab_size), computed from the quantized cache. Raises UserError where a token is outside
        the vocabulary, or the engine cannot hold it; ValueError where there is not one token for each of distinct sequences.
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
        ended: Callable[[int], None] = lambda _: None,
    ) -> list[list[int]]:
        """Return greedy continuations, in the order of the prompts; the first of the stop tokens ends one and is left out.

        A finished sequence leaves the batch and is released, and the next prompt takes its place at once. At most
        `max_sequences` live at once; `ended` is told how many continuations have ended whenever one does.

        Raises UserError as `prefill`, for any of the prompts before one is started; and for logits that are not finite, from
        which no token is picked. `prefill` and `decode` return such logits, since an evaluation counts them.
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
        self._answer(continuations, stop_tokens, len(prompts) if max_sequences is None else max_sequences, ended)
        return [one.tokens[one.prompt_tokens :] for one in continuations]

    def _answer(
        self,
        continuations: Sequence[Continuation],
        stop_tokens: Collection[int],
        max_sequences: int,
        on_end: Callable[[int], None],
    ) -> None:
        """Continue every one to its end, at most `max_sequences` of them at once."""
        import numpy as np  # here: the command line starts without it

        waiting, live = deque(continuations), list[Continuation]()
        try:
            while waiting or live:
                while waiting and len(live) < max_sequences:
                    live.append(waiting.popleft())
                advanced, logits = self._advance(live)
                broken = np.flatnonzero(~np.isfinite(logits).all(-1))
                if broken.size:
                    one = advanced[int(broken[0])]
                    raise UserError(f"logits of sequence {one.sequence} after {len(one.tokens)} tokens are {NOT_FINITE}")
                ended = []
                for one, token in zip(advanced, logits.argmax(-1).tolist(), strict=True):
                    if token not in stop_tokens:
                        one.tokens.append(token)
                    if token in stop_tokens or len(one.tokens) == one.most_tokens:
                        ended.append(one)
                live = [one for one in live if one not in ended]
                self._release_all(ended)
                if ended:
                    on_end(len(continuations) - len(waiting) - len(live))
        finally:
            self._release_all(live)

    def _advance(self, live: Sequence[Continuation]) -> tuple[Sequence[Continuation], Logits]:
        """Take one step: prefill those that have no sequence yet or, where all have one, decode.

        An engine that computes both in one pass overrides it. Return the continuations of which every token is stored now, and
        the logits (continuations, vocab_size) after these tokens.
        """
        joining = [one for one in live if one.sequence < 0]
        if joining:
            handles, logits = self.prefill([one.tokens for one in joining])
            for one, handle in zip(joining, handles, strict=True):
                one.sequence, one.stored = handle, len(one.tokens)
            return joining, logits
        logits = self.decode([one.sequence for one in live], [one.tokens[-1] for one in live])
        for one in live:
            one.stored += 1
        return live, logits

    def _release_all(self, continuations: Sequence[Continuation]) -> None:
        self.release([one.sequence for one in continuations if one.sequence >= 0])

    def release(self, sequences: Sequence[int]) -> None:
        """Free what the sequences hold; their handles are invalid from then on."""
        for sequence in sequences:
            self._release(sequence)

    def close(self) -> None:  # noqa: B027  (most engines hold nothing but memory)
        """End the process that the engine runs in, where it has one."""

    @abstractmethod
    def memory(self) -> MemoryReport:
        """Return the bytes of the cache, as allocated."""

    @abstractmethod
    def _prefill_batch(self, prompts: Sequence[Sequence[int]]) -> tuple[list[int], Logits]:
        """As `prefill`, of checked prompts."""

    @abstractmethod
    def _decode(self, sequences: Sequence[int], tokens: Sequence[int]) -> Logits:
        """As `decode`, of a checked step."""

    @abstractmethod
    def _release(self, sequence: int) -> None:
        """Free what one sequence holds."""

    def can(self, capability: Callable[..., object]) -> bool:
        """Return whether the engine has one of the methods below, as in `engine.can(Engine.fork)`."""
        return getattr(type(self), capability.__name__) is not getattr(Engine, capability.__name__)

    def corrupt_key_scale(self, factor: float) -> None:
        """Plant the must-fail control's fault: multiply the key scales that decoding reads, or stored keys without scales."""
        self.corrupt_scale(Side.KEY, factor)

    def corrupt_scale(self, side: Side, factor: float, layer: int | None = None, head: int | None = None) -> None:
        """Multiply the scales that decoding reads keys or values with, or what is stored where there are none.

        The scales are those of one layer and one of its KV heads, or of all, of stored and of later tokens; the codes stay
        right. A layer whose heads share a scale takes all of them. The inverse factor takes the fault back.
        """
        raise NotImplementedError

    def forget_prefixes(self) -> None:
        raise NotImplementedError

    def fork(self, sequence: int) -> int:
        """Start a sequence with the same tokens, which shares the full pages of the first, and return its handle."""
        raise NotImplementedError

    def extend(self, sequence: int, tokens: Sequence[int]) -> Logits:
        """Append tokens of a prompt to a sequence, as a later chunk of its prefill; return the logits (V,) of the last."""
        raise NotImplementedError

    def forced(self, tokens: Sequence[int], first: int) -> Logits:
        """Compute forced decode of a whole sequence in one pass; no sequence stays in the engine.

        Row r of the logits (len(tokens) - first, vocab_size) is what `decode` returns for tokens[first + r] after `prefill` of
        tokens[:first], at least one token, and `decode` of the tokens between. Raises UserError where the tokens are none, or
        outside the vocabulary; ValueError where `first` leaves no prefix, or no token to score.
        """
        raise NotImplementedError

    def forced_together(self, requests: Sequence[tuple[Sequence[int], int]]) -> list[Logits]:
        """Return what `forced` returns of each (tokens, first), of requests that are in flight at once.

        An engine that can serves whole requests: what it decodes together is requests, not steps.
        """
        raise NotImplementedError

    def forced_reusing(self, requests: Sequence[tuple[Sequence[int], int]]) -> list[Logits]:
        """Return what `forced` returns of each (tokens, first), with every prefix taken from the cache of earlier requests."""
        raise NotImplementedError

    def drafting(self, requests: Sequence[tuple[Sequence[int], int]], tokens: int, ngram: int) -> Drafting:
        """Answer each (prompt, number of tokens) greedily, with the engine's own prompt lookup.

        It proposes at most `tokens` tokens after at most the last `ngram` ones.
        """
        raise NotImplementedError

    def press(
        self, plays: Sequence[Sequence[tuple[Sequence[int], int]]], rows: int, pages: int | None = None
    ) -> list[list[Pressed]]:
        """Serve plays of requests, (tokens, first) as `forced` takes them, all requests of a play sent at once.

        Return of each request the logits of its last `rows` tokens. With `pages`, all plays share a pool of so many pages of
        PAGE_TOKENS that keeps the beginnings of prompts: requests wait, give way to older ones, and are computed again.
        Without, every request has room and no beginning is reused.
        """
        raise NotImplementedError

    def stored(self, sequence: int) -> Sequence[Mapping[Side, StoredCopy]]:
        """Return the copies of every layer that a sequence's pages hold. The exact tokens' own buffers are no part of it."""
        raise NotImplementedError

    def stored_request(self, number: int) -> Sequence[Mapping[Side, StoredCopy]]:
        """Return what the cache held of a request of the last `forced_together`, as `stored`.

        Empty where the engine cannot tell how its cache lies in memory.
        """
        raise NotImplementedError

    def delivery(self) -> Sequence[LayerDelivery]:
        """Return, by layer, the scales that an engine of another library loaded from its checkpoint by itself."""
        raise NotImplementedError

    def timed(self, prompts: Sequence[Sequence[int]], steps: int) -> LoadTimes:
        """Return the times of `steps` decode steps after the first token of every prompt.

        For an engine of whole requests, whose steps cannot be timed from outside.
        """
        raise NotImplementedError

    def _check_forced(self, tokens: Sequence[int], first: int) -> None:
        check_tokens(tokens, self.vocab_size)
        if not 0 < first < len(tokens):
            raise ValueError(f"first must be 1 to {len(tokens) - 1}, got {first}")


def check_tokens(tokens: Sequence[int], vocab_size: int) -> None:
    if not len(tokens):
        raise UserError("a prompt must hold at least one token, got an empty one")
    if min(tokens) < 0 or max(tokens) >= vocab_size:
        raise UserError(f"token ids must be in [0, {vocab_size}), got {min(tokens)} to {max(tokens)}")
