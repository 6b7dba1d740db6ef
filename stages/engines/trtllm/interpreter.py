"""TensorRT-LLM's interpreter: what it has, and its process."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pipeline.core.errors import MissingRequirement, UserError
from stages.engines.interpreter import process
from stages.engines.interpreter.process import Program, WorkerError
from stages.engines.trtllm.protocol import Description
from stages.engines.trtllm.worker import kvgate_forcing

WORKER = Path(kvgate_forcing.__file__).with_name("kvgate_worker.py")
PROBE_SECONDS = 300
"""Importing TensorRT-LLM from a cold disk takes a minute."""

INSTALL_HINT = (
    "run kvgate in the container nvcr.io/nvidia/tensorrt-llm/release:1.2.1 (backend.target=engine; a 1.3 tag for "
    "target=pytorch) with backend.python=python3, or give the python of an environment of Python 3.10 or 3.12 with "
    "pip install tensorrt-llm==1.2.1 --extra-index-url https://pypi.nvidia.com as backend.python=PATH"
)
"""Says how to get TensorRT-LLM. PyPI itself has only a stub."""

READ = ((1, 2), (1, 3))
"""Releases whose sources were read (tests/contract/facts). Another one is warned about."""

PROGRAM = Program("trtllm", "TensorRT-LLM", WORKER, INSTALL_HINT)


@dataclass(frozen=True)
class Interpreter:
    """TensorRT-LLM's interpreter and its GPUs, as it describes itself."""

    python: str
    release: str
    version: str
    """The version of Python."""
    gpus: tuple[tuple[str, str, str], ...]
    """Name, compute capability (8.9), driver of every GPU that CUDA shows it, in CUDA's order: rank r runs on number r."""

    @property
    def number(self) -> tuple[int, int]:
        """(major, minor) of the release."""
        major, minor = self.release.split(".")[:2]
        return int(major), int(minor)

    @property
    def unread(self) -> str | None:
        """What may differ in a release that was not read; None for one that was."""
        if self.number in READ:
            return None
        listed = " and ".join(f"{major}.{minor}" for major, minor in READ)
        return (
            f"warning: TensorRT-LLM {self.release} was not read, {listed} were: LLM arguments, where the cache's scales are, "
            "and what a logits processor is given may differ; the build and each row of logits are checked all the same"
        )

    def compute_capabilities(self, ranks: int) -> list[str]:
        """Return the compute capability of the GPUs that `ranks` ranks run on: one, or none without a GPU.

        Raises UserError when the GPUs differ.
        """
        capabilities = [capability for _, capability, _ in self.gpus[:ranks]]
        if len(set(capabilities)) > 1:
            raise UserError(
                f"backend.tensor_parallel_size={ranks}: GPUs 0 to {len(capabilities) - 1} are SM {', '.join(capabilities)}, "
                "an engine is built for one kind; choose equal GPUs with CUDA_VISIBLE_DEVICES"
            )
        return capabilities[:1]


class Worker(process.Worker):
    """A process in TensorRT-LLM's interpreter."""

    program = PROGRAM

    def __init__(self, python: str, ranks: int = 1) -> None:
        """Start the process.

        Args:
            python: The interpreter.
            ranks: GPUs of the model that it will load. A single rank runs in the worker itself, where it returns logits fastest
                and where the canary of target=pytorch reaches its layers; several ranks get processes of their own.

        Raises:
            MissingRequirement: The interpreter cannot be started.
        """
        super().__init__(python, {"TLLM_WORKER_USE_SINGLE_PROCESS": "1"} if ranks == 1 else {})


@cache
def probe(python: str | None) -> Interpreter:
    """Return what `backend.python` has installed, asked once a process. Raises MissingRequirement without TensorRT-LLM."""
    path = process.find_python(PROGRAM, python)
    with Worker(path) as worker:
        try:
            described = worker.call("describe", PROBE_SECONDS, key="backend.python", answer=Description)
        except WorkerError as error:
            raise MissingRequirement(
                f"backend.python={python}: TensorRT-LLM cannot be used there ({error}); {INSTALL_HINT}"
            ) from error
    gpus = tuple((gpu.name, gpu.compute_cap, gpu.driver_version) for gpu in described.gpus)
    return Interpreter(path, described.release, described.python, gpus)


def require_gpus(interpreter: Interpreter, count: int, purpose: str) -> None:
    """Raise MissingRequirement unless the interpreter sees `count` GPUs. `purpose`: "running an engine", say."""
    if len(interpreter.gpus) < count:
        raise MissingRequirement(
            f"backend.tensor_parallel_size={count}: {purpose} with TensorRT-LLM {interpreter.release} needs {count} NVIDIA "
            f"GPU(s), {interpreter.python} sees {len(interpreter.gpus)}; run it where nvidia-smi lists them (a container needs "
            "--gpus all)"
        )


def files_below(folder: Path, patterns: Sequence[str]) -> list[str]:
    """Return the paths in `folder` that match one of the patterns, sorted."""
    return sorted({path.relative_to(folder).as_posix() for pattern in patterns for path in folder.glob(pattern)})
