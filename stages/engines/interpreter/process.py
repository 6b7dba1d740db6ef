"""A worker: a subprocess in another interpreter. It answers one request at a time, and is killed if it does not answer."""

import contextlib
import json
import os
import re
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Self, TypeVar

from pydantic import BaseModel, ValidationError

from stages.core.child import signal_name
from stages.core.errors import MissingRequirement, UserError, short
from stages.core.redaction import child_environment
from stages.core.strict import first_problem
from stages.engines.bundle import BuiltFor, release_of
from stages.engines.interpreter.protocol import Description, Device
from stages.engines.interpreter.worker import kvgate_channel

CHANNEL = Path(kvgate_channel.__file__).parent
DESCRIBE_TIMEOUT_S = 300
"""Time limit of `describe` in seconds. Importing a library from a cold disk may take a minute."""
TIMEOUT_S = 7200.0
"""Time limit of other requests in seconds. Building an engine, or reading a large model over a network, may take an hour."""

EXIT_TIMEOUT_S = 30
"""Seconds until a worker is killed after its input was closed."""
ANSWER_BYTES = 16 << 20
"""Maximum bytes of an answer; logits are passed in files."""
MAX_ERROR_CHARACTERS = 300
"""Maximum characters of a library's error that a message quotes."""
LOG_TAIL_BYTES = 8 << 10
"""Bytes at the end of the log that are searched for the last line, because a build may print hundreds of megabytes."""
RAISED = re.compile(r"[\w.]+(Error|Exception): .")
"""Matches the last line of a traceback. Parent processes may print more lines after it."""

A = TypeVar("A", bound=BaseModel)


@dataclass(frozen=True, eq=False)
class Program:
    """A library that runs in another interpreter, and its worker script."""

    backend: str
    library: str
    """Title of the library, for example TensorRT-LLM."""
    script: Path
    """The worker's script. It can import the modules of its own folder."""
    hint: str
    """How to install the library."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables to add for the worker, for example to forbid access to a hub."""
    checked_releases: tuple[str, ...] = ()
    """Releases, or their prefixes, whose sources the worker was checked against. Any other release causes a warning."""
    oldest_release: tuple[int, int] = (0, 0)
    description: type[Description] = Description
    package: str | None = None
    """Import name of the library. Folders of PYTHONPATH that contain the package are passed to the worker."""
    hidden_variables: tuple[str, ...] = ()
    """Prefixes of environment variables that the worker does not inherit."""


@dataclass(frozen=True)
class Interpreter:
    """A library's interpreter and its machine, as the worker describes them."""

    program: Program
    python: str
    description: Any
    """The answer to `describe`, of type `program.description`."""

    @property
    def release(self) -> str:
        return str(self.description.release)

    @property
    def devices(self) -> list[Device]:
        """GPUs that the interpreter sees; empty on a CPU."""
        return list(self.description.devices)

    @property
    def compute_capabilities(self) -> list[str]:
        """Distinct compute capabilities of all GPUs, sorted."""
        return sorted({device.compute_cap for device in self.devices})

    @property
    def release_warning(self) -> str | None:
        """Warning for a release that the worker was not checked against; None for a checked release."""
        if any(f"{self.release}.".startswith(f"{checked}.") for checked in self.program.checked_releases):
            return None
        checked = ", ".join(self.program.checked_releases)
        return (
            f"warning: {self.program.library} {self.release} was not checked (checked: {checked}): "
            "argument names, the cache's layout and the logits-processor interface may differ; arguments and each row of "
            "logits are checked all the same"
        )

    def require_release(self, bundle: Path, built_for: BuiltFor) -> None:
        """Raise MissingRequirement if the arguments of a bundle are pinned for another release."""
        if built_for.version != self.release:
            raise MissingRequirement(
                f"{bundle}: its arguments are pinned for {self.program.library} {built_for.version}, but {self.python} has "
                f"{self.release}: build it again with stage=build, or give that release's python as backend.python"
            )


@cache
def inspect_interpreter(program: Program, python: str | None) -> Interpreter:
    """Return the interpreter of `backend.python` with its description; cached for the life of this process.

    Raises MissingRequirement if the library is missing or its release is older than `program.oldest_release`.
    """
    path = find_python(program, python)
    with Worker(program, path) as worker:
        try:
            described = worker.call("describe", program.description, DESCRIBE_TIMEOUT_S)
        except WorkerError as error:
            raise MissingRequirement(
                f"backend.python={python}: {program.library} cannot be used there ({error}); {program.hint}"
            ) from error
    interpreter = Interpreter(program, path, described)
    if release_of(interpreter.release) < program.oldest_release:
        oldest = ".".join(map(str, program.oldest_release))
        raise MissingRequirement(
            f"backend.python={python}: has {program.library} {interpreter.release}, backend={program.backend} needs {oldest} "
            f"or later; {program.hint}"
        )
    return interpreter


def find_python(program: Program, python: str | None) -> str:
    """Return the interpreter's path. Raises MissingRequirement if `python` is None or does not exist."""
    if python is None:
        raise MissingRequirement(
            f"backend.python=null: backend={program.backend} needs a Python that has {program.library}: {program.hint}"
        )
    path = shutil.which(str(Path(python).expanduser()) if "/" in python else python)
    if path is None:
        raise MissingRequirement(f"backend.python={python}: there is no such program; {program.hint}")
    return os.path.abspath(path)  # keeps symlinks: a virtual environment's python is one


class WorkerError(RuntimeError):
    """An error answer to a request, from the library or from the worker script."""


class Worker:
    """A process in another interpreter. It leads its own process group, so that killing the worker also kills its children."""

    def __init__(self, program: Program, python: str, **environment: str) -> None:
        """Start the process. Raises MissingRequirement if the interpreter cannot be started."""
        self.program = program
        self._scratch = tempfile.TemporaryDirectory(prefix=f"kvgate-{self.program.backend}-")
        self.folder = Path(self._scratch.name)
        """Directory for the worker's files, removed by `close`."""
        self._log = self.folder / "log"
        hidden = ("PYTHONHOME", "VIRTUAL_ENV", *self.program.hidden_variables)  # they belong to this process's Python
        inherited = {name: value for name, value in child_environment().items() if not name.startswith(hidden)}
        folders = inherited.get("PYTHONPATH", "").split(os.pathsep) if self.program.package else []
        passed = [folder for folder in folders if folder and Path(folder, str(self.program.package)).is_dir()]
        modules = os.pathsep.join((str(self.program.script.parent), str(CHANNEL), *passed))
        self._python, self._buffer, self._ended = python, bytearray(), False
        try:
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(
                    [python, str(self.program.script)],
                    bufsize=0,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env={
                        **inherited,
                        **self.program.environment,
                        **environment,
                        "PYTHONPATH": modules,
                        "PYTHONUNBUFFERED": "1",
                    },
                    cwd=self.folder,
                    start_new_session=True,
                )
        except OSError as error:
            self._scratch.cleanup()
            raise MissingRequirement(
                f"backend.python={python}: cannot be started ({error.strerror}); {self.program.hint}"
            ) from error

        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)  # a blocking write to a hanging worker would never return

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(self, op: str, answer: type[A], timeout_s: float | None = None, /, **fields: object) -> A:
        """Send a request and return its answer. The default time limit is TIMEOUT_S.

        Any exception except WorkerError, including KeyboardInterrupt, kills the worker and all its children. Otherwise a later
        request could receive the answer to this one. Raises WorkerError if the worker answered with an error;
        MissingRequirement if it was killed, probably because memory ran out; UserError if it exited, exceeded the time limit,
        or does not speak the protocol.
        """
        limit = TIMEOUT_S if timeout_s is None else timeout_s
        try:
            line = self._exchange(op, json.dumps({"op": op, **fields}).encode() + b"\n", time.monotonic() + limit)
        except (BrokenPipeError, EOFError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(EXIT_TIMEOUT_S)
            code = self._process.poll()
            ended = "closed its output" if code is None else f"ended with exit code {code}"
            if code is not None and code < 0:
                self._kill()
                raise MissingRequirement(
                    f"backend.python={self._python}: {self.program.library} was ended by {signal_name(-code)} in {op}: "
                    "out of memory? free some memory, or lower the size of the cache or of the batch"
                ) from None
            raise self._kill_and_describe(
                f"backend.python={self._python}: {self.program.library} {ended} in {op}; give a Python with the library"
            ) from None
        except TimeoutError:
            raise self._kill_and_describe(
                f"backend.python={self._python}: {self.program.library} did not answer {op} within {limit:g} s; find out what "
                "it waits for, and run it again"
            ) from None
        except BaseException:
            self._kill()
            raise
        return self._read(op, line, answer)

    def close(self) -> None:
        """Stop the worker, by force if it does not exit, and remove its files."""
        if self._process.stdin is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.stdin.close()
                self._process.wait(EXIT_TIMEOUT_S)
        self._kill()
        self._scratch.cleanup()

    def refusal(self, reason: str) -> UserError:
        """Return the UserError for a request that the library refused, as a single line."""
        return UserError(f"backend.python={self._python}: {self.program.library} {' '.join(reason.split())}")

    def last_line(self) -> str:
        """Return the last line of the log that names an exception, or else the last line."""
        with self._log.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
            lines = log.read().decode(errors="replace").strip().splitlines()
        lines = [line for line in lines if RAISED.match(line)] or lines
        return lines[-1].strip()[:MAX_ERROR_CHARACTERS] if lines else ""

    def _exchange(self, op: str, request: bytes, deadline: float) -> bytes:
        """Write the request and read a line before `deadline` (time.monotonic()).

        Raises TimeoutError after the deadline; BrokenPipeError or EOFError if the worker has exited.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        stdin, stdout = self._process.stdin.fileno(), self._process.stdout.fileno()
        unwritten = memoryview(request)
        while unwritten or b"\n" not in self._buffer:
            remaining = max(0.0, deadline - time.monotonic())
            readable, writable, _ = select.select([stdout], [stdin] if unwritten else [], [], remaining)
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
                raise self._kill_and_describe(
                    f"backend.python={self._python}: answered {op} with more than {ANSWER_BYTES >> 20} MiB"
                )
        line, _, self._buffer = self._buffer.partition(b"\n")
        return bytes(line)

    def _read(self, op: str, line: bytes, answer: type[A]) -> A:
        try:
            response = json.loads(line)
        except ValueError:
            response = None
        if isinstance(response, dict) and isinstance(response.get("error"), str):
            raise WorkerError(short(" ".join(response["error"].split()), MAX_ERROR_CHARACTERS))
        if not isinstance(response, dict) or "ok" not in response:
            raise self._kill_and_describe(
                f"backend.python={self._python}: answered {op} with {line[:200]!r}, which is not JSON of a worker; "
                "give a Python with the library, which prints nothing by itself"
            )
        try:
            return answer.model_validate(response["ok"])
        except ValidationError as error:
            raise self._kill_and_describe(
                f"backend.python={self._python}: its worker does not match this kvgate: it answered {op} with "
                f"{line[:200]!r} ({first_problem(error, 'ok')})"
            ) from None

    def _kill_and_describe(self, text: str) -> UserError:
        """Kill the worker; return a UserError that begins with `text` and quotes the last line of output."""
        self._kill()
        line = self.last_line()
        return UserError(f"{text}{f'; its last output: {line}' if line else ''}")

    def _kill(self) -> None:
        if self._ended:  # the process id may belong to another process by now
            return
        self._ended = True
        with contextlib.suppress(ProcessLookupError):
            kvgate_channel.kill_group(self._process.pid)  # the group exists until its last child exits
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
