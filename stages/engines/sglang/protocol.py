"""What the worker in SGLang's interpreter answers besides what every worker does."""

from typing import Annotated, Any, Literal

from pydantic import Field

from pipeline.core.strict import StrictModel
from stages.engines.interpreter.protocol import Device


class Description(StrictModel):
    """Answer to `describe`."""

    protocol: Literal[1]
    release: Annotated[str, Field(pattern=r"^\d+\.\d+")]
    python: str
    torch: str
    devices: list[Device]


class Facts(StrictModel):
    """Answer to `facts`: server arguments as SGLang resolved them."""

    server_args: dict[str, Any]
