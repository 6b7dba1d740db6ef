"""The stages: what each one makes, reads and needs, and which of their files are missing.

`pipeline.chain.actions` has the functions of the stages.
"""

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from stages.checkpoints.places import absence, locate_checkpoint
from stages.core.errors import MissingRequirement, UserError, short


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

MODEL = "model.path"
FILES = ("workloads.jsonl", "workloads.documents", "calibration.jsonl")
"""Keys that name files. The stages that make artifacts read these files."""


def missing_files(facts: StageFacts, values: Mapping[str, object]) -> list[str]:
    """Return a line for each path in `values` (key -> value) that a stage reads and that does not exist.

    So one error reports all missing paths.
    """
    lines, model = [], values.get(MODEL)
    if isinstance(model, str) and "${" not in model and (facts.makes or facts.plans):
        try:
            path = locate_checkpoint(model)
            if not path.exists():
                lines.append(f"{MODEL}={path}: {absence(path)}")
        except UserError as error:
            lines.append(str(error))
        except (MissingRequirement, OSError):  # reported when the checkpoint is read
            pass
    for key in FILES if facts.makes else ():
        given = values.get(key)
        with suppress(OSError):  # such as a name that is too long
            if isinstance(given, str) and "${" not in given and not os.path.lexists(file := Path(given).expanduser()):
                lines.append(f"{key}={short(file, 200)}: no such file; give one that exists")
    return lines
