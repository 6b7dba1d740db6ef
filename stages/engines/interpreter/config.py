"""What the configurations of backends share whose library runs in an interpreter of its own."""

from typing import Annotated, ClassVar

from pydantic import Field

from pipeline.core.backends import BackendConfig
from pipeline.core.strict import PathText


class InterpreterConfig(BackendConfig):
    """A backend whose library runs in another interpreter."""

    length_key: ClassVar[str]
    """The key that bounds a sequence, prompt and answer together."""
    python: PathText | None
    """The Python that has the library: a path, or a command on PATH."""
    request_timeout_s: Annotated[int, Field(ge=1)]
    """Seconds that loading a model may take, and also each batch of requests."""

    @property
    def context_limit(self) -> int:
        return int(getattr(self, self.length_key))
