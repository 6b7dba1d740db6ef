"""What the configurations of backends share whose library runs in an interpreter of its own."""

from typing import Annotated

from pydantic import Field

from pipeline.core.backends import BackendConfig
from pipeline.core.strict import PathText


class InterpreterConfig(BackendConfig):
    """A backend whose library runs in another interpreter."""

    python: PathText | None
    """The Python that has the library: a path, or a command on PATH."""
    request_timeout_s: Annotated[int, Field(ge=1)]
    """Seconds that loading a model may take, and also each batch of requests."""
