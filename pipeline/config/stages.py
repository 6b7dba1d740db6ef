"""The stages: what each one makes, reads and needs.

`pipeline.chain.stage_functions` has the functions of the stages.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal


@dataclass(frozen=True)
class StageFacts:
    makes: Literal["exports", "bundle", "report"] | None = None
    """Last artifact that the stage makes; None if it makes no artifacts."""
    plans: bool = False
    """Whether it plans memory for every policy at once."""
    tracked: bool = False
    needs_registered: bool = False
    """Whether it works on registered engines only, so that an engine must have been registered."""
    promotes: bool = False
    """Whether a single job promotes its candidate if it passed."""
    work: Literal["used", "read", "ignored"] = "used"
    """Use of the work directory. If "used", stage=prune removes nothing meanwhile."""
    reads: tuple[str, ...] = ()
    """Keys that only some stages read, this stage among them. The other stages refuse a value for such a key."""
    needs_input: bool = False
    """Whether exactly one of the keys in `reads` must have a value."""

    @property
    def builds(self) -> bool:
        return self.makes in ("bundle", "report")

    @property
    def judges(self) -> bool:
        return self.makes == "report"

    @property
    def sweepable(self) -> bool:
        return self.judges or not (self.tracked or self.plans)


STAGES = {
    "quantize": StageFacts(makes="exports"),
    "build": StageFacts(makes="bundle"),
    "evaluate": StageFacts(makes="report", tracked=True, reads=("signing.key",)),
    "promote": StageFacts(tracked=True, reads=("promote.name", "promote.sweep")),
    "rollback": StageFacts(tracked=True, needs_registered=True),
    "verify": StageFacts(work="ignored", reads=("bundle",), needs_input=True),
    "capacity": StageFacts(plans=True),
    "recommend": StageFacts(plans=True),
    "all": StageFacts(makes="report", tracked=True, promotes=True, reads=("signing.key",)),
    "route": StageFacts(tracked=True, needs_registered=True, reads=("routing.routes", "routing.rollback"), needs_input=True),
    "monitor": StageFacts(tracked=True, needs_registered=True, reads=("monitor.snapshot",), needs_input=True),
    "status": StageFacts(tracked=True, work="read"),
    "prune": StageFacts(tracked=True, work="read", reads=("prune.apply",)),  # it takes its own lock to remove artifacts
}

if TYPE_CHECKING:
    Stage = str
else:
    Stage = Literal[tuple(STAGES)]
