"""SGLang's interpreter: what it has, and its process."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from stages.engines.interpreter import process
from stages.engines.interpreter.process import Program
from stages.engines.sglang import worker
from stages.engines.sglang.protocol import Description

PROBE_SECONDS = 300
READ = "0.5.23"
"""The release that the worker was read against."""
INSTALL_HINT = (
    f"on a machine with CUDA 13 and an NVIDIA GPU give the python of an environment with pip install sglang=={READ}, or "
    f"python3 where kvgate runs in the container lmsysorg/sglang:v{READ}"
)
PROGRAM = Program("sglang", "SGLang", Path(worker.__file__).with_name("kvgate_sglang_worker.py"), INSTALL_HINT)
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "SGLANG_USE_MODELSCOPE": "0"}
"""A model is a directory; no hub is asked."""


@dataclass(frozen=True)
class Interpreter:
    """SGLang's interpreter and its machine, as it describes itself."""

    python: str
    description: Description

    @property
    def release(self) -> str:
        return self.description.release

    @property
    def compute_capabilities(self) -> list[str]:
        """Those of all GPUs; none without one."""
        return sorted({device.compute_cap for device in self.description.devices})


class Worker(process.Worker):
    """A process in SGLang's interpreter."""

    program = PROGRAM

    def __init__(self, python: str) -> None:
        """Start the process. Raises MissingRequirement when the interpreter cannot be started."""
        super().__init__(python, OFFLINE)


@cache
def probe(python: str | None) -> Interpreter:
    """Return what `backend.python` has installed, asked once a process. Raises MissingRequirement without SGLang."""
    path = process.find_python(PROGRAM, python)
    with Worker(path) as asked:
        described = asked.describe(PROBE_SECONDS, Description, python)
    return Interpreter(path, described)
