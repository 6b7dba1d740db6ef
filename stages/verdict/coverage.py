"""The coverage of a verdict: the lengths, batches and features that an evaluation exercised.

`Exercised` tracks the decode steps of the samples. `EvaluationReport.limits` adds the batch and the features of the stress
test.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from stages.core.records import Record
from stages.policies.policy import whole_pages
from stages.workloads.config import long_cost


@dataclass(config=ConfigDict(extra="forbid"))
class Exercised:
    """Maximum lengths and batches on the decode path of some samples, and counts of forks and shared prefixes."""

    longest_context: int = 0
    """Maximum tokens of a sequence at a decode step, including the step's own token."""
    longest_decode: int = 0
    batch: int = 0
    room: int = 0
    """Maximum tokens of a sample plus its longest allowed answer. An engine must be built for this length to run the sample."""
    forks: int = 0
    """Sequences that were forked: at the first token that differed from the reference, or from a document that was prefilled
    once for all its samples."""

    def note_step(self, prompt: int, position: int, batch: int) -> None:
        """Record a decode step. It predicts the token at `position` of the answer; its input is the token before."""
        self.longest_context = max(self.longest_context, prompt + position)
        self.longest_decode = max(self.longest_decode, position + 1)
        self.batch = max(self.batch, batch)

    @staticmethod
    def merged(parts: "Sequence[Exercised]") -> "Exercised":
        maxima = ("longest_context", "longest_decode", "batch", "room")
        largest = {name: max((getattr(part, name) for part in parts), default=0) for name in maxima}
        return Exercised(**largest, forks=sum(part.forks for part in parts))


FORKS = "forks"
"""Feature of `Limits`: sequences were forked, as requests with a shared prefix are."""


class Limits(Record):
    """Limits that a verdict covers, or that a bundle imposes on its engine; null means no limit."""

    tokens: int | None = None
    room: int | None = None
    """Tokens that an engine may allow even if `tokens` is smaller: it had to be built for this length to run the samples."""
    batch: int | None = None
    decoded: int | None = None
    """Maximum decoded tokens of a sample; null without a stress test."""
    stress_decoded: int = 0
    """Maximum decoded tokens of a sequence of the stress test, whose tokens are random."""
    stress_share: float = 1.0
    features: tuple[str, ...] = ()
    """Other features that were exercised: turns, forks, a full pool."""

    @classmethod
    def of_bundle(cls, record: Mapping[str, Any]) -> "Limits":
        """Return the limits in a bundle.json. Only TensorRT plans and bundles of engines in other interpreters have any."""
        return cls(tokens=record.get("max_tokens"), batch=record.get("max_batch"))

    def __str__(self) -> str:
        decoded = f", {self.decoded:,} decoded" if self.decoded is not None else ""
        if self.stress_decoded > (self.decoded or 0):
            decoded += f" ({self.stress_decoded:,} in the stress test)"
        features = " and ".join(filter(None, (", ".join(self.features[:-1]), *self.features[-1:])))
        tested = f", with {features}" if features else ""
        reduced = f" ({100 * self.stress_share:.0f} % of the stress test)" if self.stress_share < 1 else ""
        return f"up to {self.tokens or 0:,} tokens, batch {self.batch or 0}{decoded}{tested}{reduced}"

    def exceeded_by(self, bundle: "Limits") -> str | None:
        """Return a message if a limit of the bundle exceeds the covered limit, else None. Lengths are compared in pages."""
        if bundle.tokens is not None and self.tokens is not None:
            covered = whole_pages(max(self.tokens, self.room or 0))
            if bundle.tokens > covered:
                return (
                    f"it was judged {self}, and its bundle allows {bundle.tokens:,} tokens: build it for {covered}, or judge "
                    f"it with workloads.lengths=[{bundle.tokens}] ({long_cost(bundle.tokens)})"
                )
        if bundle.batch is not None and self.batch is not None and bundle.batch > self.batch:
            return (
                f"it was judged {self}, and its bundle allows batches of {bundle.batch}: build it for {self.batch}, or judge "
                f"it with workloads.batch_size={bundle.batch}"
            )
        return None
