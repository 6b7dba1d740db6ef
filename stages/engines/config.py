"""The base classes of backend configurations, and the registry of backends.

A backend is a folder of `stages/engines`. Its `config.py` has the typed configuration and imports no heavy library; its
`backend.py` builds and runs the engines.
"""

from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Annotated, ClassVar, get_args

import psutil
from pydantic import Field, field_validator

from stages.core.strict import PathText, StrictModel

ENGINES = Path(__file__).parent


class BackendConfig(StrictModel):
    """Base of the backend configurations. A subclass that describes a backend declares a literal `name`."""

    name: str
    in_process: ClassVar[bool] = False
    """Whether engines run in this process, so that their cache must fit into this machine's memory."""
    least_preferred: ClassVar[bool] = False
    """Whether an equally good engine of another backend is preferred (true for the reference engine)."""
    shares_pages: ClassVar[bool] = True
    """Whether all layers keep the same pages, as in kvgate's pool. Otherwise each layer keeps only pages that it attends to."""
    takes_quantized: ClassVar[tuple[str, ...]] = ()
    """Values of quant_method whose weights engines load as they are, without dequantizing them."""
    finer: ClassVar[tuple[str, ...]] = ("fp8",)
    """Policies to suggest, in ascending order of bytes: `stage=recommend` begins with the largest; after a policy failed, the
    next larger one is suggested."""

    length_key: ClassVar[str | None] = None
    """Configuration key that limits prompt plus answer, in tokens; None if only the model limits them."""

    @property
    def folder(self) -> str:
        return type(self).__module__.split(".")[-2]

    @property
    def context_limit(self) -> int | None:
        """Maximum tokens per sequence that the engines are built for; None if only the model limits them."""
        return None if self.length_key is None else int(getattr(self, self.length_key))


class InProcessConfig(BackendConfig):
    """Configuration of a backend whose engines run in this process: on a CPU or, with backend=torch, also on a GPU."""

    in_process = True
    finer = ("int4_g32", "fp8k_int4v", "fp8", "int8")
    threads: Annotated[int, Field(ge=1, le=1024)]
    """CPU threads per engine; null uses one per physical core."""

    @field_validator("threads", mode="before")
    @classmethod
    def _all_cores(cls, threads: object) -> object:
        if threads is not None:
            return threads
        # The number is resolved here, once, because it is part of an evaluation's key. If the number of physical cores is
        # unknown, the number of logical cores is used.
        return psutil.cpu_count(logical=False) or psutil.cpu_count() or 1


def is_least_preferred(backend: str) -> bool:
    """Return whether an equally good engine of another backend is preferred to an engine of `backend`."""
    config = backend_configs().get(backend)
    return config is not None and config.least_preferred


@cache
def backend_configs() -> dict[str, type[BackendConfig]]:
    configs: dict[str, type[BackendConfig]] = {}
    for path in sorted(ENGINES.glob("*/config.py")):
        module = import_module(f"stages.engines.{path.parent.name}.config")
        for record in vars(module).values():
            if isinstance(record, type) and issubclass(record, BackendConfig):
                configs |= dict.fromkeys(get_args(record.model_fields["name"].annotation), record)
    return configs


class InterpreterConfig(BackendConfig):
    """Configuration of a backend whose library runs in another interpreter."""

    shares_pages = False
    python: PathText | None
    """Python interpreter with the library: a path or a command on PATH."""
