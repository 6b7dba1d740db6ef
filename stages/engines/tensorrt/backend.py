"""backend=tensorrt_rtx and backend=tensorrt: plans built from the ONNX engine's graph."""

from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from typing import Any, Generic, TypeVar

from stages.checkpoints.description import refuse_other_attention
from stages.checkpoints.exports import supporting_backend
from stages.core.errors import MissingRequirement, UserError
from stages.core.hardware import gpus
from stages.engines.backend import ROUNDING, Artifacts, Backend, Job, Source
from stages.engines.gpu import require_gpu
from stages.engines.interface import Engine
from stages.engines.onnx.backend import refuse_reference_only
from stages.engines.onnx.config import OnnxRuntimeConfig
from stages.engines.tensorrt.config import PlanConfig, TensorRTConfig, TensorRTRTXConfig
from stages.engines.tensorrt.library import Name, load
from stages.policies.policy import FP16_POLICY, KVPolicy

TENSOR_TYPES = ("FLOAT", "FLOAT16", "BFLOAT16", "INT8", "INT32", "INT64", "FLOAT8E4M3FN")
"""ONNX's names of the element types that TensorRT accepts as inputs."""
FP8, FIRST_FP8 = "FLOAT8E4M3FN", 89
"""The FP8 type, and the lowest compute capability with FP8. TensorRT for RTX does not convert FP8 for older GPUs."""

C = TypeVar("C", bound=PlanConfig)


class PlanBackend(Backend[C], Generic[C]):
    """The common base class of the TensorRT backends.

    Artifact keys contain the version of the imported module, because the libraries are distributed under several package names.
    """

    libraries = ("onnx", "numpy")

    library: Name

    @property
    def rounding(self) -> float:
        return ROUNDING[self.config.compute_dtype]

    def source(self, artifacts: Artifacts, policy: KVPolicy) -> Source:
        config = OnnxRuntimeConfig(name="onnxruntime", compute_dtype=self.config.compute_dtype, threads=1, attention="auto")
        bundle = artifacts.bundle(policy, config)
        return Source(bundle.path, bundle.digest)

    def run_parts(self) -> dict[str, object]:
        """Return the library and its version, on which running a plan depends."""
        return {"library": self.library, "versions": {self.library: load(self.library).version}}

    def run_libraries(self) -> tuple[str, ...]:
        return ("torch",)  # allocates the pool and captures CUDA graphs

    def load(self, bundle: Path) -> Engine:
        from stages.engines.tensorrt.engine import load_engine

        return load_engine(bundle, library=self.library)

    def build_arguments(self) -> dict[str, Any]:
        return {"library": self.library, **self._sizes()}

    def _sizes(self) -> dict[str, int]:
        return {"max_batch": self.config.max_batch, "max_tokens": self.config.max_tokens}

    def _check_extents(self, job: Job, native: Callable[[KVPolicy], Iterable[int]]) -> None:
        """Raise UserError for sizes that TensorRT cannot address. `native`: policy -> layers without the plugin."""
        from stages.engines.tensorrt.shapes import check_extents

        for policy in built_policies(job):
            check_extents(policy, job.checkpoint.shape, job.checkpoint.q_heads, native(policy), **self._sizes())


class RTXBackend(PlanBackend[TensorRTRTXConfig]):
    """TensorRT for RTX, which builds plans for the named GPUs, even on a machine without a GPU."""

    build_module = "stages.engines.tensorrt.build"

    library = "tensorrt_rtx"

    @property
    def targets(self) -> list[int]:
        return sorted(set(self.config.compute_capabilities))

    def check_inputs(self, job: Job) -> None:
        refuse_caches(job)
        refuse_targets(job.policy, self.targets)
        if job.builds:
            self._check_extents(job, lambda _: range(job.checkpoint.shape.layers))
            load(self.library)

    def check_runs(self) -> None:
        from stages.engines.bundle import BuiltFor, check_built_for
        from stages.engines.tensorrt.engine import this_machine

        trt, capabilities = load(self.library), [f"{target // 10}.{target % 10}" for target in self.targets]
        built = BuiltFor(library=trt.title, version=trt.version, compute_capabilities=capabilities)
        check_built_for(Path(f"backend={self.library}"), built, this_machine(trt, built))

    def build_parts(self) -> dict[str, object]:
        return {**self.run_parts(), **self._sizes(), "targets": self.targets}

    def build_arguments(self) -> dict[str, Any]:
        return {**super().build_arguments(), "targets": self.targets}


class TensorRTBackend(PlanBackend[TensorRTConfig]):
    """TensorRT, which builds plans with the attention plugin on the GPU that will run them."""

    build_module = "stages.engines.tensorrt.plugin"

    library = "tensorrt"

    def check_inputs(self, job: Job) -> None:
        refuse_caches(job)
        if not job.builds:
            return
        from stages.engines.paged.kernel_layout import choose_layers

        shape, q_heads = job.checkpoint.shape, job.checkpoint.q_heads
        self._check_extents(job, lambda policy: choose_layers(policy, shape, q_heads).refusals)
        load(self.library)
        cuda_gpu()
        takes_plugin = any(choose_layers(policy, shape, q_heads).layouts for policy in built_policies(job))
        if takes_plugin and triton_version() is None:
            raise MissingRequirement("backend=tensorrt needs Triton for the attention plugin: pip install 'triton>=3.6,<3.8'")

    def build_parts(self) -> dict[str, object]:
        """Return the parts of a build, including the GPU, because plans are tuned for the GPU that builds them."""
        versions = {self.library: load(self.library).version, "triton": triton_version()}
        return {"library": self.library, **self._sizes(), "gpu": cuda_gpu(), "versions": versions}

    def build_arguments(self) -> dict[str, Any]:
        return {**super().build_arguments(), "gpu": cuda_gpu()}


def built_policies(job: Job) -> list[KVPolicy]:
    """Return the policies to build engines for: the candidate's and, if the job judges, the baseline's."""
    return [job.policy, FP16_POLICY] if job.judges else [job.policy]


def refuse_caches(job: Job) -> None:
    """Raise UserError if the plans cannot compute or store a format, or if a layer does not attend to all tokens.

    The engine derives positions from its pages, so it cannot skip tokens.
    """
    policy = job.policy
    refuse_reference_only(policy)
    for key, form in policy.formats:
        if form.code.storage.onnx not in TENSOR_TYPES:
            raise UserError(
                f"kv.{key}.dtype={form.dtype}: TensorRT has no type {form.code.storage.onnx}; choose another type, or "
                f"backend=onnxruntime, which runs kv={policy.name}"
            )
    refuse_other_attention(job.checkpoint, "plans read every page of a sequence")
    if policy.eviction is not None:
        raise UserError(
            f"kv.eviction.window_tokens={policy.eviction.window_tokens}: plans read every page of a sequence; set "
            f"kv.eviction=null, or {supporting_backend(policy)}, which evicts"
        )


def refuse_targets(policy: KVPolicy, targets: list[int]) -> None:
    """Raise UserError if the plans would need a type that a compute capability in `targets` lacks."""
    fit = [target for target in targets if target >= FIRST_FP8]
    if fit == targets:
        return
    for key, form in policy.formats:
        if FP8 in (form.code.storage.onnx, form.code.scale_storage.onnx):
            fix = f"set backend.compute_capabilities={str(fit).replace(' ', '')}" if fit else "name other GPUs"
            raise UserError(
                f"backend.compute_capabilities={str(targets).replace(' ', '')}: kv.{key}.dtype={form.dtype} needs FP8, which "
                f"GPUs have from {FIRST_FP8} on; {fix}, or choose a policy without FP8, such as kv=int8"
            )


def cuda_gpu() -> dict[str, str]:
    """Return CUDA's current GPU, which builds and runs the plans. Raises MissingRequirement if it or its driver is missing."""
    gpu = require_gpu("backend=tensorrt", "use backend=tensorrt_rtx, which builds plans without a GPU")
    devices = gpus()
    if not devices:
        raise MissingRequirement("backend=tensorrt needs the driver's version for the key of its plans: install nvidia-smi")
    return {"name": gpu.name, "compute_cap": gpu.capability, "driver_version": devices[0]["driver_version"]}


def triton_version() -> str | None:
    """Return Triton's version; None if it is not installed. Only plans with the plugin need Triton."""
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return None


def open_backend(config: PlanConfig) -> PlanBackend[Any]:
    backends: dict[str, type[PlanBackend[Any]]] = {"tensorrt": TensorRTBackend, "tensorrt_rtx": RTXBackend}
    return backends[config.name](config)
