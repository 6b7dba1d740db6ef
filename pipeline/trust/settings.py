"""`promote.*` on the command line."""

from typing import Annotated

from pydantic import Field

from pipeline.core.strict import StrictModel

Text = Annotated[str, Field(min_length=1)]


class PromoteConfig(StrictModel):
    """What stage=promote looks at, what it keeps to, and what it may do that it would refuse."""

    name: Text | None
    """The candidate that is promoted if it passed; null takes the best. Also one that was rolled back, or of a sweep that did
    not finish."""
    sweep: Text | None
    """The sweep whose candidates are looked at; null takes the last one."""
    policy: Text | None
    """The file of a gate policy, which the registered model keeps from then on; null keeps to the one that it has."""
    decode_again: Annotated[int, Field(ge=0, le=1000)]
    """Samples that are decoded again before an alias moves, on engines that open in seconds; 0 asks no engine."""
    loosen_policy: bool
    """Whether that file may be looser than the policy that the model has."""
    accept_broken_log: bool
    """Whether to go on where the log of moves cannot be trusted."""
