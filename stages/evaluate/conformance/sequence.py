"""Sequences of the stress test's scenarios."""

from dataclasses import dataclass, field

from stages.engines.reference.attention import Fed
from stages.evaluate.conformance.request import Request


@dataclass(eq=False)
class StressSequence:
    """A sequence in a scenario of the stress test."""

    role: str
    """Name of the sequence in failure messages."""
    prompt: list[int]
    ahead: list[int] = field(default_factory=list)
    """Tokens still to be fed."""
    watched: bool = True
    """Whether the sequence is compared with the reference engine."""
    handle: int = -1
    tokens: list[int] = field(default_factory=list)
    pieces: list[tuple[int, bool]] = field(default_factory=list)
    request: Request = field(default_factory=lambda: Request(""))

    @property
    def decoded(self) -> int:
        return sum(count for count, decoded in self.pieces if decoded)

    @property
    def fed(self) -> Fed:
        return Fed(self.tokens, self.pieces)

    @property
    def key(self) -> tuple[tuple[int, ...], tuple[tuple[int, bool], ...]]:
        """Key of the sequence's sensitivity to rounding, which depends on the tokens and on how they were fed."""
        return tuple(self.tokens), tuple(self.pieces)
