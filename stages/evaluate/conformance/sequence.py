"""A sequence that an engine was fed, with its logits and copies of its codes in the engine's cache."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256

import numpy as np

from stages.core.records import StoredCopy
from stages.engines.interface import Logits
from stages.engines.reference.attention import Fed
from stages.policies.policy import Side


@dataclass(eq=False)
class ForcedSequence:
    """A sequence of the forced decode or of the stress test. It grows with every `feed`."""

    name: str
    prompt: list[int]
    ahead: list[int] = field(default_factory=list)
    """Tokens that the stress test still decodes."""
    watched: bool = True
    """Whether the stress test compares the sequence with the reference engine."""
    handle: int = -1
    """Handle in the engine; -1 before the start and after the release."""
    tokens: list[int] = field(default_factory=list)
    pieces: list[tuple[int, bool]] = field(default_factory=list)
    """See `Fed.pieces`."""
    logits: list[Logits] = field(default_factory=list)
    """Logits (V) of the sequence's last rows."""
    places: list[tuple[int, int] | None] = field(default_factory=list)
    """(index in the batch, batch size) of the step that computed each row of logits; None if unknown."""
    layers: list[dict[Side, StoredCopy]] = field(default_factory=list)
    """Copies of the codes in the engine's cache, by layer; empty if the engine does not expose them."""

    @property
    def decoded(self) -> int:
        return sum(count for count, decoded in self.pieces if decoded)

    @property
    def fed(self) -> Fed:
        return Fed(self.tokens, self.pieces)

    @property
    def positions(self) -> list[int]:
        return self.fed.rows[-len(self.places) :]

    @property
    def key(self) -> tuple[tuple[int, ...], tuple[tuple[int, bool], ...]]:
        """Key of the measured rounding, which depends only on the tokens and on how they were fed."""
        return tuple(self.tokens), tuple(self.pieces)

    def digest(self, end: int | None = None) -> bytes:
        """Return the SHA-256 digest of the stored copies of the tokens before position `end`; None for all tokens."""
        digest = sha256()
        for side, copy in (item for layer in self.layers for item in layer.items()):
            digest.update(f"{side} {copy.first} {copy.evicted}".encode())
            part = slice(None if end is None else max(0, end - copy.first))
            stored = [None if array is None else array[:, part] for array in (copy.codes, copy.scale, copy.zero)]
            for array in (*stored, copy.static_scale, copy.static_zero):
                digest.update(b"" if array is None else array.tobytes())
        return digest.digest()

    def shared_tokens(self, origin: "ForcedSequence", chunk: int) -> int:
        """Return how many first tokens the sequence shares with `origin`.

        The shared tokens are equal, were fed in equal pieces, and have equal stored codes. They end before the sequence's first
        row of logits, and after a full prefill chunk or a decoded token.
        """
        most = count_equal_first(self.tokens[: self.positions[0]], origin.tokens)
        shared = 0
        for (count, decoded), (other, other_decoded) in zip(self.pieces, origin.pieces, strict=False):
            equal = min(count, other, most - shared) if decoded == other_decoded else 0
            whole = equal == count == other
            shared += equal if whole or decoded else equal // chunk * chunk
            if not whole:
                break
        return shared if shared and self.digest(shared) == origin.digest(shared) else 0

    def feed(self, tokens: Sequence[int], logits_V: Logits, place: tuple[int, int] | None, *, decoded: bool) -> None:
        """Append tokens, and the logits after the last token."""
        self.tokens += tokens
        if decoded and self.pieces and self.pieces[-1][1]:
            self.pieces[-1] = (self.pieces[-1][0] + len(tokens), True)
        else:
            self.pieces.append((len(tokens), decoded))
        self.logits.append(logits_V.copy())
        self.places.append(place)

    def branch(self, name: str, handle: int, ahead: list[int]) -> "ForcedSequence":
        """Return a fork, which has the tokens and copies but no logits."""
        layers = [dict(layer) for layer in self.layers]
        return ForcedSequence(
            name, self.prompt, ahead, self.watched, handle, tokens=list(self.tokens), pieces=list(self.pieces), layers=layers
        )

    def observe(self, shown: Sequence[Mapping[Side, StoredCopy]]) -> None:
        """Record the codes that the engine stores now. Freed tokens keep their earlier record."""
        held = self.layers or [{} for _ in shown]
        self.layers = [
            before | {side: _with_lost_tokens(before.get(side, copy), copy) for side, copy in layer.items()}
            for before, layer in zip(held, shown, strict=True)
        ]


def count_equal_first(first: Sequence[int], second: Sequence[int]) -> int:
    equal, most = 0, min(len(first), len(second))
    while equal < most:  # binary search, because comparing slices is faster than comparing single tokens
        middle = (equal + most + 1) // 2
        if first[equal:middle] == second[equal:middle]:
            equal = middle
        else:
            most = middle - 1
    return equal


def _with_lost_tokens(before: StoredCopy, copy: StoredCopy) -> StoredCopy:
    """Return `copy`, with its evicted tokens restored from the earlier copy `before`.

    Tokens that were stored and evicted between the two copies, in a turn longer than the window, count as evicted.
    """
    # A window loses its first tokens. An evicting cache loses tokens after its sinks, and shows them as zeros.
    start, stop = copy.evicted[0] if copy.evicted else (0, copy.first - before.first)
    if stop <= 0:
        return copy
    known = before.codes.shape[1]
    lost = max(start, known)  # sinks that came after the earlier copy are in `copy`

    def joined(old: np.ndarray | None, new: np.ndarray | None) -> np.ndarray | None:
        if old is None or new is None:
            return None
        unknown = np.zeros_like(new, shape=(new.shape[0], max(0, stop - lost), *new.shape[2:]))
        rest = new[:, stop if copy.evicted else 0 :]
        both: np.ndarray = np.concatenate([old[:, :stop], new[:, known:start], unknown, rest], axis=1)
        return both

    codes = joined(before.codes, copy.codes)
    assert codes is not None
    evicted = (*before.evicted, (lost, stop)) if lost < stop else before.evicted
    scale, zero = joined(before.scale, copy.scale), joined(before.zero, copy.zero)
    return replace(copy, first=before.first, codes=codes, scale=scale, zero=zero, evicted=evicted)
