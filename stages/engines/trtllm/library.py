"""TensorRT-LLM's interpreter and its GPUs."""

from pathlib import Path

from pipeline.core.errors import MissingRequirement, UserError
from stages.engines.interpreter.process import Interpreter, Program
from stages.engines.trtllm import worker

PROGRAM = Program(
    "trtllm",
    "TensorRT-LLM",
    Path(worker.__file__).with_name("kvgate_worker.py"),
    # PyPI itself has only a stub.
    "run kvgate in the container nvcr.io/nvidia/tensorrt-llm/release:1.2.1 (backend.target=engine; a 1.3 tag for "
    "target=pytorch) with backend.python=python3, or give the python of an environment of Python 3.10 or 3.12 with "
    "pip install tensorrt-llm==1.2.1 --extra-index-url https://pypi.nvidia.com as backend.python=PATH",
    read=("1.2", "1.3", "1.4"),
)
"""The releases were read from their sources (tests/contract/facts)."""


def rank_environment(ranks: int) -> dict[str, str]:
    """Return a worker's variables for a model on so many GPUs.

    A single rank runs in the worker itself, where it returns logits fastest and where the must-fail control of
    target=pytorch reaches its layers; several ranks get processes of their own.
    """
    return {"TLLM_WORKER_USE_SINGLE_PROCESS": "1"} if ranks == 1 else {}


def rank_capabilities(interpreter: Interpreter, ranks: int) -> list[str]:
    """Return the compute capability of the GPUs that `ranks` ranks run on: one, or none without a GPU.

    Raises UserError when the GPUs differ.
    """
    capabilities = [device.compute_cap for device in interpreter.devices[:ranks]]
    if len(set(capabilities)) > 1:
        raise UserError(
            f"backend.tensor_parallel_size={ranks}: GPUs 0 to {len(capabilities) - 1} are SM {', '.join(capabilities)}, "
            "an engine is built for one kind; choose equal GPUs with CUDA_VISIBLE_DEVICES"
        )
    return capabilities[:1]


def require_gpus(interpreter: Interpreter, count: int, purpose: str) -> None:
    """Raise MissingRequirement unless the interpreter sees `count` GPUs. `purpose`: "running an engine", say."""
    if len(interpreter.devices) < count:
        raise MissingRequirement(
            f"backend.tensor_parallel_size={count}: {purpose} with TensorRT-LLM {interpreter.release} needs {count} NVIDIA "
            f"GPU(s), {interpreter.python} sees {len(interpreter.devices)}; run it where nvidia-smi lists them (a container "
            "needs --gpus all)"
        )
