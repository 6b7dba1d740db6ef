"""What the user says of a backend: one record each, told apart by `name`."""

from typing import Annotated, Literal

from pydantic import Field

from pipeline.strict import StrictModel


class _Backend(StrictModel):
    threads: Annotated[int, Field(ge=1, le=1024)]

    @property
    def build_options(self) -> dict[str, object]:
        """Keyword arguments of the backend's `build_bundle` that change what is built."""
        return {}

    @property
    def run_options(self) -> dict[str, object]:
        """Keyword arguments of the backend's `load_engine`."""
        return {"threads": self.threads}


class GraphBackend(_Backend):
    """What is built from the exported ONNX decoder."""

    compute_dtype: Literal["float32", "float16"]
    """In which activations and weights are computed; part of the graph's digest."""


class OnnxRuntimeBackend(GraphBackend):
    """The embedded engine: the graphs as they are, on any CPU."""

    name: Literal["onnxruntime"]


class TorchBackend(_Backend):
    """The oracle on a CPU; the attention kernels on a GPU."""

    name: Literal["torch"]
    device: Literal["auto", "cpu", "cuda"]
    """auto is cuda where torch finds a GPU."""

    @property
    def run_options(self) -> dict[str, object]:
        return {**super().run_options, "device": self.device}


BackendConfig = Annotated[OnnxRuntimeBackend | TorchBackend, Field(discriminator="name")]
