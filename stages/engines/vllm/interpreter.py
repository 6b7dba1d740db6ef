"""vLLM's interpreter: what it has, and its process."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pipeline.core.errors import MissingRequirement
from stages.engines.interpreter import process
from stages.engines.interpreter.process import Program
from stages.engines.vllm import worker
from stages.engines.vllm.protocol import Description

PROBE_SECONDS = 300
"""Importing vLLM from a cold disk takes a minute."""
OLDEST, READ = (0, 30), (0, 32)
"""The worker was read against 0.32; releases before 0.30 lack names that it uses."""

INSTALL_HINT = (
    "make vllm installs vLLM's CPU build into .venv-vllm: backend.python=.venv-vllm/bin/python; on a GPU machine run kvgate in "
    "the container vllm/vllm-openai:v0.32.0 with backend.python=python3, or give the python of an environment with "
    "pip install vllm==0.32.0"
)

PROGRAM = Program("vllm", "vLLM", Path(worker.__file__).with_name("kvgate_vllm_worker.py"), INSTALL_HINT)

OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_PLUGINS": "",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
"""A model is a directory, and nothing but the release itself runs: neither a hub nor an installed plugin is asked."""
IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "0"}
"""The engine in the worker itself, with the runner that takes logits processors."""


@dataclass(frozen=True)
class Interpreter:
    """vLLM's interpreter and its machine, as it describes itself."""

    python: str
    description: Description

    @property
    def release(self) -> str:
        return self.description.release

    @property
    def unread(self) -> str | None:
        """What may differ in a release that was not read; None for the one that was."""
        if self.release.startswith(f"{READ[0]}.{READ[1]}."):
            return None
        return (
            f"warning: vLLM {self.release} was not read, {READ[0]}.{READ[1]} was: engine arguments, and where scales and codes "
            "lie, may differ; arguments, scales and each row of logits are checked all the same"
        )

    @property
    def on_cpu(self) -> bool:
        return self.description.platform == "cpu"

    @property
    def compute_capabilities(self) -> list[str]:
        """Those of all GPUs; none on a CPU."""
        return sorted({device.compute_cap for device in self.description.devices})


class Worker(process.Worker):
    """A process in vLLM's interpreter."""

    program = PROGRAM

    def __init__(self, python: str, threads: int | None = None) -> None:
        """Start the process. Raises MissingRequirement when the interpreter cannot be started.

        Args:
            python: The interpreter.
            threads: CPU threads that it may use; None leaves them to vLLM.
        """
        bound = {} if threads is None else {"OMP_NUM_THREADS": str(threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        super().__init__(python, {**OFFLINE, **IN_PROCESS, **bound})


@cache
def probe(python: str | None) -> Interpreter:
    """Return what `backend.python` has installed, asked once a process. Raises MissingRequirement without a fit release."""
    path = process.find_python(PROGRAM, python)
    with Worker(path) as asked:
        described = asked.describe(PROBE_SECONDS, Description, python)
    major, minor = described.release.split(".")[:2]
    if (int(major), int(minor)) < OLDEST:
        raise MissingRequirement(
            f"backend.python={python}: has vLLM {described.release}, backend=vllm needs {OLDEST[0]}.{OLDEST[1]} or later; "
            f"{INSTALL_HINT}"
        )
    return Interpreter(path, described)
