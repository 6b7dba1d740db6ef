"""backend=torch: the reference engine on a CPU, the engine over the attention kernels on a GPU. Both load the same bundles."""

from pathlib import Path
from typing import TYPE_CHECKING

from stages.checkpoints.description import refuse_other_attention
from stages.core.errors import MissingRequirement
from stages.engines.backend import ROUNDING, TORCH, Artifacts, Backend, Job, Source
from stages.engines.interface import Engine
from stages.engines.torch.config import TorchConfig
from stages.policies.policy import KVPolicy

if TYPE_CHECKING:
    from stages.engines.reference.engine import TorchEngine

FLOAT16_WEIGHTS = 2.0**-17
"""Rounding error with float32 activations on a GPU, where the kernels round the softmax's weights to float16.

It is twice the measured error: on an H200 the median KL with an FP16 cache was 4e-8, as with a rounding error of 2^-18.
"""


class TorchBackend(Backend[TorchConfig]):
    """Runs transformers' model over a quantized cache.

    On a CPU this is the reference engine, whose plain cache defines the result of every policy. On a GPU the attention kernels
    read and write the cache.
    """

    build_module = "stages.engines.reference.build"
    libraries = TORCH

    def check_inputs(self, job: Job) -> None:
        """Check that the kernels support the policy and, if the command judges, that the GPU exists. Building needs no GPU."""
        if self.config.device == "cpu":
            return
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
    def rounding(self) -> float:
        weights = self.config.compute_dtype == "float32" and self._finds_gpu()
        return FLOAT16_WEIGHTS if weights else ROUNDING[self.config.compute_dtype]

    def source(self, artifacts: Artifacts, policy: KVPolicy) -> Source:  # noqa: ARG002
        weights = artifacts.weights()
        return Source(weights.path / "checkpoint", weights.digest_under("checkpoint"))

    def run_parts(self) -> dict[str, object]:
        """Return the device and its settings, with the GPU's identity, because another GPU must not reuse results."""
        if not self._finds_gpu():
            return {"threads": self.config.threads, "device": "cpu"}
        from stages.engines.gpu import gpu_identity

        return {"threads": self.config.threads, **gpu_identity(), "compute_dtype": self.config.compute_dtype}

    def run_libraries(self) -> tuple[str, ...]:
        return ("triton",) if self._finds_gpu() else ()

    def load(self, bundle: Path) -> Engine:
        if not self._finds_gpu():
            self._refuse_reference()
            return self.load_reference(bundle, "cpu")
        from stages.engines.cuda.engine import load_engine

        return load_engine(bundle, threads=self.config.threads, compute_dtype=self.config.compute_dtype)

    def load_reference(self, bundle: Path, device: str) -> "TorchEngine":
        import torch

        from stages.engines.reference.engine import load_engine

        return load_engine(bundle, threads=self.config.threads, device=torch.device(device))

    def _refuse_reference(self) -> None:
        if self.config.compute_dtype != "float32":
            raise MissingRequirement(
                f"backend.compute_dtype={self.config.compute_dtype}: torch finds no NVIDIA GPU, and on a CPU backend=torch "
                "is the reference engine, which computes in float32; set backend.compute_dtype=float32"
            )

    def _finds_gpu(self) -> bool:
        """Return whether the engine runs on a GPU. Raises MissingRequirement if a GPU is requested or found but unusable."""
        if self.config.device == "cpu":
            return False
        from stages.engines.gpu import resolve_device

        return resolve_device(self.config.device) == "cuda"


open_backend = TorchBackend
