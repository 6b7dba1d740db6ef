"""backend=torch on a GPU: the engine over the attention kernels.

backend.device=auto selects this engine if torch finds a GPU, else the reference engine. Both engines load the same bundles.
"""

from pathlib import Path

from stages.checkpoints.description import refuse_other_attention
from stages.core.errors import MissingRequirement
from stages.engines.backend import FLOAT16_WEIGHTS, Job
from stages.engines.interface import Engine
from stages.engines.reference.backend import TorchBackend


class CudaBackend(TorchBackend):
    """transformers' model on the current GPU, with attention through the kernels."""

    def check_inputs(self, job: Job) -> None:
        """Refuse a policy that the kernels do not support and, if the command judges, a missing GPU. Building needs no GPU."""
        if self.config.device == "auto" and not (job.judges and self._finds_gpu()):
            if job.judges:
                self._refuse_reference()
            return
        from stages.engines.paged.kernel_layout import check_kernels

        check_kernels(job.policy, job.checkpoint.shape, job.checkpoint.q_heads)
        refuse_other_attention(job.checkpoint, "the Triton kernels compute neither")
        if job.judges:
            self._finds_gpu()

    @property
    def compute_dtype(self) -> str:
        weights = self.config.compute_dtype == "float32" and self._finds_gpu()
        return FLOAT16_WEIGHTS if weights else self.config.compute_dtype

    @property
    def engine_module(self) -> str:  # type: ignore[override]  # torch decides which engine runs
        return "stages.engines.cuda.engine" if self._finds_gpu() else super().engine_module

    def run_parts(self) -> dict[str, object]:
        """Return the reference engine's parts and the GPU's identity, so that another GPU does not reuse results."""
        from stages.engines.cuda.device import device_identity

        parts = {**super().run_parts(), **device_identity(self.config.device)}
        return parts | ({"compute_dtype": self.config.compute_dtype} if parts["device"] == "cuda" else {})

    def run_libraries(self) -> tuple[str, ...]:
        return ("triton",) if self._finds_gpu() else ()

    def load(self, bundle: Path) -> Engine:
        if not self._finds_gpu():
            self._refuse_reference()
            return super().load(bundle)
        from stages.engines.cuda.engine import load_engine

        return load_engine(bundle, threads=self.config.threads, compute_dtype=self.config.compute_dtype)

    def _refuse_reference(self) -> None:
        """Raise MissingRequirement if `compute_dtype` is not the reference engine's float32."""
        if self.config.compute_dtype != "float32":
            raise MissingRequirement(
                f"backend.compute_dtype={self.config.compute_dtype}: torch finds no NVIDIA GPU, and on a CPU backend=torch "
                "is the reference engine, which computes in float32; set backend.compute_dtype=float32"
            )

    def _finds_gpu(self) -> bool:
        """Return whether the engine runs on a GPU. Raises MissingRequirement if a GPU is requested or found but unusable."""
        from stages.engines.cuda.device import resolve_device

        return resolve_device(self.config.device).type == "cuda"


open_backend = CudaBackend
