"""TensorRT-LLM's interpreter as a subprocess, which answers one request at a time and is killed when it does not."""

import contextlib
import json
import os
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
from typing import Self, TypeVar

from pydantic import BaseModel, ValidationError

from pipeline.core.errors import MissingRequirement, UserError
from stages.engines.trtllm.protocol import PROTOCOL, Description
from stages.engines.trtllm.worker import kvgate_forcing

WORKER = Path(kvgate_forcing.__file__).with_name("kvgate_worker.py")
PROBE_SECONDS = 300
"""Importing TensorRT-LLM from a cold disk takes a minute."""
EXIT_TIMEOUT_S = 30
"""Seconds that a worker has to end after its input was closed; freeing an engine takes a moment."""
ANSWER_BYTES = 16 << 20
"""The longest answer; logits come in files."""
LOG_TAIL_BYTES = 8 << 10
"""Bytes at the end of the log in which the last line is looked for: a build may print hundreds of megabytes."""

A = TypeVar("A", bound=BaseModel)

INSTALL_HINT = (
    "run kvgate in the container nvcr.io/nvidia/tensorrt-llm/release:1.2.1 (backend.target=engine; a 1.3 tag for "
    "target=pytorch) with backend.python=python3, or give the python of an environment of Python 3.10 or 3.12 with "
    "pip install tensorrt-llm==1.2.1 --extra-index-url https://pypi.nvidia.com as backend.python=PATH"
)
"""Says how to get TensorRT-LLM. PyPI itself has only a stub."""


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


def find_python(python: str | None) -> str:
    """Return the interpreter's path. Raises MissingRequirement when there is none."""
    if python is None:
        raise MissingRequirement(f"backend.python=null: backend=trtllm needs a Python that has TensorRT-LLM: {INSTALL_HINT}")
    program = shutil.which(str(Path(python).expanduser()) if "/" in python else python)
    if program is None:
        raise MissingRequirement(f"backend.python={python}: there is no such program; {INSTALL_HINT}")
    return os.path.abspath(program)  # not resolved: a virtual environment's python is a link


@cache
def probe(python: str | None) -> Interpreter:
    """Return what `backend.python` has installed, asked once a process. Raises MissingRequirement without TensorRT-LLM."""
    path = find_python(python)
    with Worker(path) as worker:
        try:
            described = worker.call("describe", PROBE_SECONDS, key="backend.python", answer=Description)
        except WorkerError as error:
            raise MissingRequirement(
                f"backend.python={python}: TensorRT-LLM cannot be used there ({error}); {INSTALL_HINT}"
            ) from error
    gpus = tuple((gpu.name, gpu.compute_cap, gpu.driver_version) for gpu in described.gpus)
    return Interpreter(path, described.release, described.python, gpus)


class WorkerError(RuntimeError):
    """An error that TensorRT-LLM, or the script in its interpreter, answered a request with."""


class Worker:
    """A process in TensorRT-LLM's interpreter, in a process group of its own: its children are killed with it."""

    def __init__(self, python: str, ranks: int = 1) -> None:
        """Start the process.

        Args:
            python: The interpreter.
            ranks: GPUs of the model that it will load. A single rank runs in the worker itself, where it returns logits fastest
                and where the canary of target=pytorch reaches its layers; several ranks get processes of their own.

        Raises:
            MissingRequirement: The interpreter cannot be started.
        """
        self._scratch = tempfile.TemporaryDirectory(prefix="kvgate-trtllm-")
        self.folder = Path(self._scratch.name)
        """Directory for the worker's files, removed when it ends."""
        self._log = self.folder / "log"
        hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")  # our libraries are of another Python
        environment = {name: value for name, value in os.environ.items() if name not in hidden}
        environment |= {"PYTHONPATH": str(WORKER.parent), "PYTHONUNBUFFERED": "1"}
        environment |= {"TLLM_WORKER_USE_SINGLE_PROCESS": "1"} if ranks == 1 else {}
        self._python, self._buffer, self._ended = python, bytearray(), False
        try:
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(
                    [python, str(WORKER)],
                    bufsize=0,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env=environment,
                    cwd=self.folder,
                    start_new_session=True,
                )
        except OSError as error:
            self._scratch.cleanup()
            raise MissingRequirement(
                f"backend.python={python}: cannot be started ({error.strerror}); {INSTALL_HINT}"
            ) from error

        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)  # a worker that hangs does not read either

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(self, op: str, timeout_s: float, *, key: str, answer: type[A], **fields: object) -> A:
        """Send a request and return its answer.

        After any exception except WorkerError, an interrupt included, the worker and all its children are gone: otherwise a
        later request could get the answer to this one.

        Args:
            op: Name of the request.
            timeout_s: Seconds until the answer.
            key: The configuration's key that gives `timeout_s`.
            answer: The record of the answer.
            fields: The request's fields.

        Raises:
            WorkerError: The worker answered with an error.
            UserError: The worker died, took too long, or does not speak the protocol.
        """
        try:
            line = self._exchange(op, json.dumps({"op": op, **fields}).encode() + b"\n", time.monotonic() + timeout_s)
        except (BrokenPipeError, EOFError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(EXIT_TIMEOUT_S)
            code = self._process.poll()
            ended = "closed its output" if code is None else f"ended with exit code {code}"
            if code is not None and code < 0:
                ended = f"was ended by {signal.Signals(-code).name}"
            raise self._lost(f"backend.python={self._python}: TensorRT-LLM {ended} in {op}") from None
        except TimeoutError:
            raise self._lost(f"{key}={timeout_s:g}: TensorRT-LLM did not answer {op} in time; give it longer") from None
        except BaseException:
            self._kill()
            raise
        return self._read(op, line, answer)

    def close(self) -> None:
        """End the worker, by force if it does not end itself, and remove its files."""
        if self._process.stdin is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.stdin.close()
                self._process.wait(EXIT_TIMEOUT_S)
        self._kill()
        self._scratch.cleanup()

    def last_line(self) -> str:
        """Return the last line that TensorRT-LLM printed."""
        with self._log.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
            lines = log.read().decode(errors="replace").strip().splitlines()
        return lines[-1].strip()[:300] if lines else ""

    def _exchange(self, op: str, request: bytes, deadline: float) -> bytes:
        """Write the request and read a line, before the deadline.

        Raises TimeoutError after it, BrokenPipeError or EOFError when the worker is gone.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        stdin, stdout = self._process.stdin.fileno(), self._process.stdout.fileno()
        unwritten = memoryview(request)
        while unwritten or b"\n" not in self._buffer:
            left = max(0.0, deadline - time.monotonic())
            readable, writable, _ = select.select([stdout], [stdin] if unwritten else [], [], left)
            if not readable and not writable:
                raise TimeoutError
            if writable:
                unwritten = unwritten[os.write(stdin, unwritten) :]
            if readable:
                chunk = os.read(stdout, 1 << 16)
                if not chunk:
                    raise EOFError
                self._buffer += chunk
            if len(self._buffer) > ANSWER_BYTES:
                raise self._lost(f"backend.python={self._python}: answered {op} with more than {ANSWER_BYTES >> 20} MiB")
        line, _, self._buffer = self._buffer.partition(b"\n")
        return bytes(line)

    def _read(self, op: str, line: bytes, answer: type[A]) -> A:
        try:
            response = json.loads(line)
        except ValueError:
            response = None
        if isinstance(response, dict) and isinstance(response.get("error"), str):
            raise WorkerError(response["error"])
        if not isinstance(response, dict) or "ok" not in response:
            raise self._lost(f"backend.python={self._python}: no answer to {op} but {line[:200]!r}")
        try:
            return answer.model_validate(response["ok"])
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "ok"
            raise self._lost(
                f"backend.python={self._python}: does not speak protocol {PROTOCOL} of this kvgate, answered {op} with "
                f"{line[:200]!r} ({where}: {first['msg']})"
            ) from None

    def _lost(self, text: str) -> UserError:
        self._kill()
        line = self.last_line()
        return UserError(f"{text}{f'; it last said: {line}' if line else ''}")

    def _kill(self) -> None:
        if self._ended:  # its process id may be another's by now
            return
        self._ended = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # the group outlives its leader while a child does
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()


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
