"""A sequence of a scenario of the stress test."""

from dataclasses import dataclass, field

from stages.engines.oracle.attention import Fed
from stages.evaluate.reference.request import Request


@dataclass(eq=False)
class StressSequence:
    """A sequence of a scenario."""

    role: str
    """Its name in failures."""
    prompt: list[int]
    ahead: list[int] = field(default_factory=list)
    """Tokens that it is going to be fed."""
    watched: bool = True
    """Whether it is compared."""
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
        """What a rounding costs depends on the tokens, and on how they came."""
        return tuple(self.tokens), tuple(self.pieces)
