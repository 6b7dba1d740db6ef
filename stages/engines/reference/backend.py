"""backend=torch on a CPU, built from the quantized checkpoint. It also loads the reference engine on any device."""

from pathlib import Path

from stages.engines.backend import TORCH, Artifacts, Backend, Job, Source
from stages.engines.interface import Engine
from stages.engines.reference.config import TorchConfig
from stages.policies.policy import KVPolicy


class TorchBackend(Backend):
    """The reference engine: transformers over a plain quantized cache, which defines the result of every policy."""

    build_module = "stages.engines.reference.build"
    engine_module = "stages.engines.reference.engine"
    libraries = TORCH

    config: TorchConfig

    def check_inputs(self, job: Job) -> None:
        """Accept every policy and checkpoint."""

    def source(self, artifacts: Artifacts, policy: KVPolicy) -> Source:  # noqa: ARG002
        """Return the checkpoint of the weights' artifact."""
        weights = artifacts.weights()
        return Source(weights.path / "checkpoint", weights.digest_under("checkpoint"))

    def run_parts(self) -> dict[str, object]:
        return {"threads": self.config.threads, "device": "cpu"}

    def load(self, bundle: Path) -> Engine:
        return self.load_reference(bundle, "cpu")

    def load_reference(self, bundle: Path, device: str) -> Engine:
        """Load a bundle as the reference engine on `cpu` or `cuda`."""
        import torch

        from stages.engines.reference.engine import load_engine

        return load_engine(bundle, threads=self.config.threads, device=torch.device(device))


open_backend = TorchBackend
