"""TensorRT-LLM's interpreter as a subprocess: started, asked one thing at a time, and killed when it does not answer."""

import contextlib
import json
import os
import re
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self

from pipeline.errors import MissingRequirement, UserError
from stages.trtllm.worker import kvgate_forcing

PROTOCOL = 1
WORKER = Path(kvgate_forcing.__file__).with_name("kvgate_worker.py")
PROBE_SECONDS = 300
"""Importing TensorRT-LLM from a cold disk takes a minute."""
GONE_SECONDS = 30
"""What a worker gets to end after its input was closed; freeing an engine takes a moment."""

HOW = (
    "run kvgate in the container nvcr.io/nvidia/tensorrt-llm/release:1.2.1 (backend.target=engine; a 1.3 tag for "
    "target=pytorch) with backend.python=python3, or give the python of an environment of Python 3.10 or 3.12 with "
    "pip install tensorrt-llm==1.2.1 --extra-index-url https://pypi.nvidia.com as backend.python=PATH"
)
"""How to get a TensorRT-LLM. PyPI itself has no more than a stub."""


@dataclass(frozen=True)
class Interpreter:
    """What answered."""

    python: str
    release: str
    version: str
    """Of Python."""
    gpus: tuple[tuple[str, str, str], ...]
    """Name, compute capability (8.9), driver of every GPU."""

    @property
    def number(self) -> tuple[int, int]:
        """The release's first two numbers."""
        major, minor = self.release.split(".")[:2]
        return int(major), int(minor)

    @property
    def compute_capabilities(self) -> list[str]:
        return sorted({capability for _, capability, _ in self.gpus})


def find_python(python: str | None) -> str:
    """The interpreter's path; MissingRequirement when there is none."""
    if python is None:
        raise MissingRequirement(f"backend.python=null: backend=trtllm needs a Python that has TensorRT-LLM: {HOW}")
    found = shutil.which(str(Path(python).expanduser()) if "/" in python else python)
    if found is None:
        raise MissingRequirement(f"backend.python={python}: there is no such program; {HOW}")
    return os.path.abspath(found)  # not resolved: a virtual environment's python is a link


@cache
def probe(python: str | None) -> Interpreter:
    """What `backend.python` has installed, asked once a process. Raises MissingRequirement when it has no TensorRT-LLM."""
    path = find_python(python)
    with Worker(path) as worker:
        try:
            found = worker.call("describe", PROBE_SECONDS, key="backend.python")
        except WorkerError as error:
            raise MissingRequirement(f"backend.python={python}: TensorRT-LLM cannot be used there ({error}); {HOW}") from error
    if found.get("protocol") != PROTOCOL or not re.match(r"\d+\.\d+", str(found.get("release"))):
        raise UserError(f"backend.python={python}: does not speak protocol {PROTOCOL} of this kvgate, answered {found}")
    gpus = tuple((gpu["name"], gpu["compute_cap"], gpu["driver_version"]) for gpu in found["gpus"])
    return Interpreter(path, found["release"], found["python"], gpus)


class WorkerError(RuntimeError):
    """TensorRT-LLM, or the script in its interpreter, said what is wrong."""


class Worker:
    """A process in TensorRT-LLM's interpreter, in a group of its own: what it starts is killed with it.

    `ranks`: GPUs of the model that it will load. One is served in the worker itself, where it returns logits fastest and
    where the canary of target=pytorch reaches its layers; more get processes of their own.
    """

    def __init__(self, python: str, ranks: int = 1) -> None:
        self._scratch = tempfile.TemporaryDirectory(prefix="kvgate-trtllm-")
        self.folder = Path(self._scratch.name)
        """Where the worker may leave files until it ends."""
        self._log = (self.folder / "log").open("w+b")
        hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")  # our libraries are of another Python
        environment = {name: value for name, value in os.environ.items() if name not in hidden}
        environment |= {"PYTHONPATH": str(WORKER.parent), "PYTHONUNBUFFERED": "1"}
        environment |= {"TLLM_WORKER_USE_SINGLE_PROCESS": "1"} if ranks == 1 else {}
        self._python, self._buffer = python, b""
        try:
            self._process = subprocess.Popen(
                [python, str(WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env=environment,
                cwd=self.folder,
                start_new_session=True,
            )
        except OSError as error:
            self._scratch.cleanup()
            raise MissingRequirement(f"backend.python={python}: cannot be started ({error.strerror}); {HOW}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(self, op: str, timeout_s: float, *, key: str, **fields: object) -> dict[str, Any]:
        """The answer to one request.

        `key` is the configuration's key that bounds the time. Raises WorkerError with what the worker says is wrong, and
        UserError when it dies, hangs or does not speak the protocol; it is gone then, with all its children.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"op": op, **fields}).encode() + b"\n")
            self._process.stdin.flush()
            line = self._line(time.monotonic() + timeout_s)
        except (BrokenPipeError, EOFError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(GONE_SECONDS)
            code = self._process.poll()
            ended = "closed its output" if code is None else f"ended with exit code {code}"
            if code is not None and code < 0:
                ended = f"was ended by {signal.Signals(-code).name}"
            raise self._lost(f"backend.python={self._python}: TensorRT-LLM {ended} in {op}") from None
        except TimeoutError:
            raise self._lost(f"{key}={timeout_s:g}: TensorRT-LLM did not answer {op} in time; give it longer") from None
        try:
            answer = json.loads(line)
            if "error" in answer:
                raise WorkerError(answer["error"])
            found: dict[str, Any] = answer["ok"]
        except (ValueError, KeyError, TypeError):
            raise self._lost(f"backend.python={self._python}: no answer to {op} but {line[:200]!r}") from None
        return found

    def close(self) -> None:
        """End the worker, by force if it does not go, and remove its files."""
        if self._process.stdin is not None:
            with contextlib.suppress(subprocess.TimeoutExpired, BrokenPipeError):
                self._process.stdin.close()
                self._process.wait(GONE_SECONDS)
        self._kill()
        self._scratch.cleanup()

    def _line(self, deadline: float) -> bytes:
        assert self._process.stdout is not None
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._process.stdout], [], [], left)[0]:
                raise TimeoutError
            chunk = os.read(self._process.stdout.fileno(), 1 << 16)
            if not chunk:
                raise EOFError
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _lost(self, text: str) -> UserError:
        self._kill()
        said = self.last_words()
        return UserError(f"{text}{f'; it last said: {said}' if said else ''}")

    def last_words(self) -> str:
        """The last line that TensorRT-LLM printed."""
        self._log.flush()
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return lines[-1].strip()[:300] if lines else ""

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # the group outlives its leader while a child does
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None and not stream.closed:
                stream.close()


def require_gpus(found: Interpreter, count: int, what: str) -> None:
    """MissingRequirement unless the machine has `count` GPUs."""
    if len(found.gpus) < count:
        raise MissingRequirement(
            f"backend.tensor_parallel_size={count}: {what} with TensorRT-LLM {found.release} needs {count} NVIDIA GPU(s), "
            f"{found.python} sees {len(found.gpus)}; run it where nvidia-smi lists them (a container needs --gpus all)"
        )


def files_below(folder: Path, patterns: Sequence[str]) -> list[str]:
    """Names in `folder`, sorted, that fit one of the patterns."""
    return sorted({path.relative_to(folder).as_posix() for pattern in patterns for path in folder.glob(pattern)})
