"""What the configurations of backends share, and which there are.

Each folder of `stages/engines` that is a backend has its typed configuration in `config.py`, light to import, and builds and
runs its engines in `backend.py`.
"""

from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Annotated, ClassVar, get_args

import psutil
from pydantic import Field, field_validator

from pipeline.core.strict import StrictModel

ENGINES = Path(__file__).parents[2] / "stages" / "engines"


class BackendConfig(StrictModel):
    """The configuration of one backend; a subclass that is one has a literal `name`."""

    name: str
    in_process: ClassVar[bool] = False
    """Whether its engines open in seconds in this process, on any CPU, and hold their cache in this machine's memory."""
    serves_last: ClassVar[bool] = False
    """Whether any other engine that is as good serves in its place: it is written to be read."""
    takes_quantized: ClassVar[bool] = False
    """Whether its engines compute with weights that a checkpoint stores quantized, as they are."""
    finer: ClassVar[tuple[str, ...]] = ("fp8",)
    """Policies to try in place of one that failed, from few bytes to many."""

    length_key: ClassVar[str | None] = None
    """Its key that bounds a sequence, prompt and answer together; None where only the model does."""

    @property
    def folder(self) -> str:
        return type(self).__module__.split(".")[-2]

    @property
    def context_limit(self) -> int | None:
        """Most tokens of a sequence that its engines are made for; None where only the model limits them."""
        return None if self.length_key is None else int(getattr(self, self.length_key))


class InProcessConfig(BackendConfig):
    """A backend whose engines compute on this machine's CPU, in this process."""

    in_process = True
    finer = ("int4_g32", "fp8k_int4v", "fp8", "int8")
    threads: Annotated[int, Field(ge=1, le=1024)]
    """CPU threads that one engine uses. null in a configuration is this machine's physical cores."""

    @field_validator("threads", mode="before")
    @classmethod
    def _all_cores(cls, threads: object) -> object:
        if threads is not None:
            return threads
        # Decided here and once: the number is part of an evaluation's key. Where cores cannot be told, their threads are.
        return psutil.cpu_count(logical=False) or psutil.cpu_count() or 1


def serves_last(backend: str) -> bool:
    """Return whether any other engine that is as good serves in place of one of this backend."""
    config = backend_configs().get(backend)
    return config is not None and config.serves_last


@cache
def backend_configs() -> dict[str, type[BackendConfig]]:
    found: dict[str, type[BackendConfig]] = {}
    for path in sorted(ENGINES.glob("*/config.py")):
        module = import_module(f"stages.engines.{path.parent.name}.config")
        for record in vars(module).values():
            if isinstance(record, type) and issubclass(record, BackendConfig):
                found |= dict.fromkeys(get_args(record.model_fields["name"].annotation), record)
    return found
