"""The use that a capacity is planned for: memory, the mix of requests, and sharing of the cache (`capacity.*`)."""

from fractions import Fraction
from typing import Annotated, Self

from pydantic import Field, model_validator

from stages.core.strict import StrictModel

Tokens = Annotated[int, Field(ge=1, le=1 << 24)]
MAX_IN_A_MIX = 1000


class Context(StrictModel):
    """Requests of one length."""

    tokens: Tokens
    """Maximum tokens of a request, prompt and answer."""
    requests: Annotated[int, Field(ge=1, le=MAX_IN_A_MIX)]
    """Number of requests of this length in the mix."""


class CapacityConfig(StrictModel):
    """The intended use, `capacity.*` on the command line."""

    gpu_gib: Annotated[float, Field(gt=0, le=1e6)]
    """Memory of one GPU, in GiB."""
    reserve_gib: Annotated[float, Field(ge=0, le=1e6)]
    """Memory per GPU for activations, graphs, the runtime and static scales, in GiB."""
    weights_gib: Annotated[float, Field(ge=0, le=1e6)] | None
    """Weights of the whole model, in GiB; None counts the weights from config.json."""
    ceiling: Annotated[float, Field(gt=0, le=1)]
    """Share of the cache's memory that admitted requests may fill."""
    contexts: Annotated[list[Context], Field(min_length=1, max_length=64)]
    new_tokens: Tokens
    """Tokens of the longest answer, included in its context's tokens."""
    concurrency: Annotated[int, Field(ge=1, le=1_000_000)]
    """Number of requests that must be served at once."""
    tensor_parallel: Annotated[int, Field(ge=1, le=1024)]
    shared_prefix_tokens: Annotated[int, Field(ge=0, le=1 << 24)]
    """Number of first tokens that all requests have in common."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        shortest, longest = min(c.tokens for c in self.contexts), max(c.tokens for c in self.contexts)
        if sum(context.requests for context in self.contexts) > MAX_IN_A_MIX:
            raise ValueError(f"contexts must be at most {MAX_IN_A_MIX} requests in all: divide them by a common number")
        if self.shared_prefix_tokens >= shortest:
            raise ValueError(
                f"shared_prefix_tokens={self.shared_prefix_tokens} must be less than the shortest of contexts, {shortest}"
            )
        if self.new_tokens > longest:
            raise ValueError(
                f"new_tokens={self.new_tokens} is a part of a context, and the longest has {longest} tokens; lower it"
            )
        return self

    @property
    def longest(self) -> int:
        """Tokens of the longest request."""
        return max(context.tokens for context in self.contexts)

    @property
    def cycle(self) -> list[int]:
        """Tokens of the mix's requests in order of arrival. Each length is spread as evenly as possible."""
        places = [
            ((2 * number + 1) / (2 * context.requests), context.tokens)
            for context in self.contexts
            for number in range(context.requests)
        ]
        return [tokens for _, tokens in sorted(places)]

    def below_ceiling(self, amount: int) -> int:
        """Return the ceiling's share of `amount` bytes, rounded down. The ceiling is used as the decimal that was written."""
        return int(Fraction(str(self.ceiling)) * amount)
