"""The base of every record that users write or bundles carry: strict, frozen, no unknown keys, no NaN."""

from pydantic import BaseModel, ConfigDict


class StrictModel(BaseModel):
    """Nothing is coerced; pydantic's own error texts do not repeat values, which may be secrets."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, hide_input_in_errors=True)
