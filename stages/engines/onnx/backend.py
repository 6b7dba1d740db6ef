"""backend=onnxruntime: builds a policy's graph from the exported decoder, and runs it."""

from pathlib import Path

from stages.checkpoints.exports import supporting_backend
from stages.core.artifact import Recipe
from stages.core.child import run_in_child
from stages.core.errors import UserError
from stages.core.records import Progress
from stages.engines.backend import ROUNDING, TORCH, Artifacts, Backend, Job, Source
from stages.engines.interface import Engine
from stages.engines.onnx.config import OnnxRuntimeConfig, refuse_bfloat16
from stages.engines.onnx.native.compiler import find_compiler, kernel_digest, require_compiler
from stages.policies.policy import KVPolicy


class OnnxBackend(Backend[OnnxRuntimeConfig]):
    libraries = ("onnx", "onnxscript", "onnxruntime", "numpy", "scipy")

    def check_inputs(self, job: Job) -> None:
        refuse_bfloat16(self.config.compute_dtype)
        refuse_heavy_tokens(job.policy)
        refuse_reference_only(job.policy)
        if self.config.attention == "native":
            require_compiler()

    @property
    def rounding(self) -> float:
        return ROUNDING[self.config.compute_dtype]

    def source(self, artifacts: Artifacts, policy: KVPolicy) -> Source:  # noqa: ARG002
        """Return the exported decoder with placeholders for attention, so that all policies over the same weights share it."""
        weights = artifacts.weights()
        dtype = self.config.compute_dtype
        inputs = {"checkpoint": weights.digest_under("checkpoint")}
        libraries = (*TORCH, *self.libraries)
        recipe = Recipe("export", {"compute_dtype": dtype}, inputs, libraries)

        def build(out: Path, progress: Progress) -> None:
            from stages.engines.onnx.export import export_decoder

            run_in_child(export_decoder, weights.path / "checkpoint", out, compute_dtype=dtype, progress=progress)

        export = artifacts.make(recipe, build)
        return Source(export.path, export.digest)

    def run_parts(self) -> dict[str, object]:
        return {"threads": self.config.threads, "attention": self._attention()}

    def load(self, bundle: Path) -> Engine:
        from stages.engines.onnx.engine import load_engine

        return load_engine(bundle, threads=self.config.threads, attention=self.config.attention)

    def _attention(self) -> str:
        """Return "graph", or the kernel with the digest of its sources, flags, compiler and processor."""
        if self.config.attention == "graph":
            return "graph"
        compiler = require_compiler() if self.config.attention == "native" else find_compiler()
        return "graph" if compiler is None else f"native kernel {kernel_digest(compiler)[:16]}"


def refuse_reference_only(policy: KVPolicy) -> None:
    """Raise UserError for a format that only the reference engine computes."""
    for key, form in policy.formats:
        if form.code.reference_only:
            key_part, instead = ("dtype", []) if form.arithmetic == "kvgate" else ("arithmetic", ["arithmetic=kvgate"])
            if form.arithmetic == "kvgate":
                instead.append(f"dtype=int{form.code.bits}")
            if form.rotation not in ("none", "hadamard"):
                instead.append("rotation=hadamard")
            raise UserError(
                f"kv.{key}.{key_part}={getattr(form, key_part)}: ONNX graphs cannot compute this format; "
                f"use {supporting_backend(policy)}, or set {' '.join(f'kv.{key}.{change}' for change in instead)}"
            )


def refuse_heavy_tokens(policy: KVPolicy) -> None:
    """Raise UserError for H2O's eviction."""
    if policy.eviction is not None and policy.eviction.heavy_tokens:
        raise UserError(
            f"kv.eviction.heavy_tokens={policy.eviction.heavy_tokens}: each layer and KV head would keep different tokens, but "
            "one page table serves all layers and heads; use backend=torch backend.device=cpu, or set heavy_tokens to 0"
        )


open_backend = OnnxBackend
