"""`promote.*` on the command line."""

from typing import Annotated

from pydantic import Field

from pipeline.core.strict import StrictModel


class PromoteConfig(StrictModel):
    """What stage=promote looks at, and what it may do that it would refuse."""

    name: Annotated[str, Field(min_length=1)] | None
    """The candidate that is promoted if it passed; null takes the best. Also one that was rolled back, or of a sweep that did
    not finish."""
    sweep: Annotated[str, Field(min_length=1)] | None
    """The sweep whose candidates are looked at; null takes the last one."""
    accept_broken_log: bool
    """Whether to go on where the log of moves cannot be trusted."""
