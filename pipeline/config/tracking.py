"""`tracking.*` on the command line."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from stages.core.redaction import holds_secret
from stages.core.strict import CONTROLS, StrictModel

ENVIRONMENT = "MLFLOW_TRACKING_URI"
"""Variable with the store's address, for `uri=null`."""


class Tracking(StrictModel):
    """MLflow tracking and registry."""

    enabled: bool = True
    """Whether runs and engines are logged. An engine that is not logged can neither be registered nor promoted."""
    uri: Annotated[str, Field(min_length=1)] | None = None
    """Database URI or server address; null means MLFLOW_TRACKING_URI, or SQLite in the work directory if that is not set."""
    experiment: Annotated[str, Field(min_length=1, max_length=200, pattern=rf"^[^{CONTROLS}]+$")] = "kvgate"
    """Name of the MLflow experiment."""
    model_name: Annotated[str, Field(min_length=1, max_length=200, pattern=rf"^[^/:{CONTROLS}]+$")] | None = None
    """Name of the registered model; null means `kvgate-<model>`."""
    log_bundle: bool | None = None
    """Whether the registry gets a copy of the whole bundle; null means only if the store is SQLite on this machine."""
    timeout_s: Annotated[float, Field(ge=1, le=3600)] = 30
    """Maximum seconds to wait for an answer of the store, or for another process to unlock it."""

    @model_validator(mode="after")
    def _keeps_secrets_out(self) -> Self:
        # Configurations are printed, stored with sweeps and logged.
        if self.uri is not None and holds_secret(self.uri):
            raise ValueError(f"uri must not hold a password; set {ENVIRONMENT} in the environment instead")
        return self
