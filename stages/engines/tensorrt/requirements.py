"""What building plans needs of this machine, asked before anything is made, and the versions that plans depend on."""

from importlib import metadata

from pipeline.config.config import Config
from pipeline.core.backends import TensorRTBackend
from pipeline.core.checkpoint import CheckpointInfo
from pipeline.core.errors import MissingRequirement
from pipeline.core.kv import FP16_POLICY
from stages.engines.tensorrt.library import Name, load


def check_inputs(config: Config, info: CheckpointInfo) -> None:
    """Raise MissingRequirement for a library, a GPU or a CUDA build of torch that the stage's plans cannot be built without."""
    backend = config.backend
    if not isinstance(backend, TensorRTBackend):
        load("tensorrt_rtx")
        return
    load("tensorrt")
    gpu = backend.gpu
    from stages.engines.paged.kernel_layout import choose_layers
    from stages.engines.tensorrt.plugin import check_gpu

    check_gpu(gpu)
    policies = [config.kv] if config.stage == "build" else [config.kv, FP16_POLICY]
    if any(choose_layers(policy, info.shape, info.q_heads).layouts for policy in policies) and _triton() is None:
        raise MissingRequirement("backend=tensorrt needs Triton for the attention plugin: pip install 'kvgate[kernels]'")


def versions(library: Name) -> dict[str, str | None]:
    """Of what plans are made with, by module; TensorRT itself comes in distributions of several names.

    None is what is not installed: only plans with the plugin need Triton. Raises MissingRequirement without TensorRT.
    """
    found: dict[str, str | None] = {library: load(library).version}
    return found | ({"triton": _triton()} if library == "tensorrt" else {})


def _triton() -> str | None:
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return None
