"""Configuration of backend=torch."""

from typing import Literal, Self

from pydantic import model_validator

from stages.engines.config import InProcessConfig


class TorchConfig(InProcessConfig):
    """Configuration of backend=torch: the reference engine on a CPU, the attention kernels on a GPU."""

    least_preferred = True
    name: Literal["torch"]
    device: Literal["auto", "cpu", "cuda"]
    """Device of the engine; auto means cuda if torch finds a GPU, else cpu."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of weights and activations on a GPU. Keys and values are always quantized in float32."""

    @model_validator(mode="after")
    def _check_compute_dtype(self) -> Self:
        if self.device == "cpu" and self.compute_dtype != "float32":
            raise ValueError(
                f"compute_dtype={self.compute_dtype}: on a CPU backend=torch is the reference engine, which computes in "
                "float32; set backend.device=cuda, or backend.compute_dtype=float32"
            )
        return self
