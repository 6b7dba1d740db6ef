"""The common configuration of backends whose library runs in another interpreter."""

from typing import Annotated

from pydantic import Field

from stages.core.strict import PathText
from stages.engines.config import BackendConfig


class InterpreterConfig(BackendConfig):
    """Configuration of a backend whose library runs in another interpreter."""

    python: PathText | None
    """The Python that has the library: a path or a command on PATH."""
    request_timeout_s: Annotated[int, Field(ge=1)]
    """Time limit in seconds for loading a model and for each batch of requests."""
