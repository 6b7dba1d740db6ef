"""Compiles the attention kernel for this machine and a model's heads into a private cache of the user.

Libraries are loaded only from that cache, and compiled only from this package's sources, never from a bundle. A
library's file name ends with the sha256 of its bytes. Loading checks this digest, because a truncated library would crash the
process.
"""

import hashlib
import importlib.util
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from stages.core.digest import file_digest
from stages.core.errors import MissingRequirement, UserError
from stages.core.redaction import child_environment

SOURCES = ("operator.c", "prefill.c", "attention.c", "pages.h", "codes.h", "ort_abi.h")
"""The kernel's sources. The first file includes the others."""

FLAGS = ("-O3", "-march=native", "-fPIC", "-shared", "-fvisibility=hidden", "-fno-math-errno")

FEATURES = {"avx2", "f16c", "fma"}
"""Required features of the x86-64 processor. With AVX-512 the kernel is faster."""

TIMEOUT_S = 300
"""Time limit of a compilation in seconds; on an idle machine it takes a few seconds."""

UNUSED_S = 30 * 24 * 3600.0
"""Seconds since the last use after which a library, or the folder of a killed compilation, is removed."""

HINT = "install a C compiler (Debian: gcc and libc6-dev) or `pip install 'ziglang>=0.13'`, or set backend.attention=graph"


@dataclass(frozen=True)
class Compiler:
    command: tuple[str, ...]
    version: str


@cache
def find_compiler() -> Compiler | None:
    """Return the system's `cc`, else the wheel `ziglang`'s compiler; None if both are missing or the CPU is unsupported."""
    if not _processor()[1] >= FEATURES:
        return None
    commands: list[tuple[str, ...]] = []
    system = shutil.which("cc")
    if system is not None:
        commands.append((system,))
    if importlib.util.find_spec("ziglang") is not None:
        # -P ignores a folder named ziglang in the working directory.
        commands.append((sys.executable, "-P", "-m", "ziglang", "cc"))
    for command in commands:
        try:
            answer = _run([*command, "--version"])
        except (OSError, subprocess.SubprocessError):
            continue
        if answer.returncode == 0:
            return Compiler(command, answer.stdout.splitlines()[0] if answer.stdout else "")
    return None


def require_compiler() -> Compiler:
    """Return the compiler. Raises MissingRequirement if there is no compiler or the CPU is unsupported."""
    compiler = find_compiler()
    if compiler is None:
        if not _processor()[1] >= FEATURES:
            raise MissingRequirement("backend.attention=native needs Linux on x86-64 with AVX2: set backend.attention=graph")
        raise MissingRequirement(f"backend.attention=native compiles its kernel, but there is no C compiler here: {HINT}")
    return compiler


def kernel_digest(compiler: Compiler) -> str:
    """Return the digest of sources, flags, compiler and processor, which determine the kernel's code for given heads."""
    digest = hashlib.sha256()
    name, features = _processor()
    for part in (*FLAGS, compiler.version, name, *sorted(features)):
        digest.update(part.encode() + b"\0")
    for name in SOURCES:
        digest.update(_source(name).read_bytes() + b"\0")
    return digest.hexdigest()


def compiled_kernel(head_dim: int, group: int) -> Path:
    """Return the kernel's library for heads of `head_dim` channels and `group` query heads per KV head; compile it if needed.

    A file whose bytes do not match the digest in its name is removed and compiled again. A compilation also removes everything
    that was not used for UNUSED_S. Concurrent processes compile to separate files. Raises MissingRequirement if there is no
    compiler or it refuses the sources; UserError as `cache_folder`.
    """
    compiler = require_compiler()
    folder = cache_folder()
    name = f"attention-{kernel_digest(compiler)[:32]}-{head_dim}-{group}"
    for library in sorted(folder.glob(f"{name}-*.so")):
        with suppress(OSError):  # on a read-only file system
            os.utime(library)
        with suppress(FileNotFoundError):  # another process removed it
            if library == _path_with_digest(library, folder, name):
                return library
            library.unlink()
    _remove_unused(folder)
    with tempfile.TemporaryDirectory(dir=folder, prefix="compile-") as work:
        out = Path(work) / f"{name}.so"
        sizes = (f"-DHEAD_DIM={head_dim}", f"-DGROUP={group}")
        command = [*compiler.command, *FLAGS, *sizes, str(_source(SOURCES[0])), "-o", str(out), "-lm"]
        try:
            answer = _run(command)
        except (OSError, subprocess.SubprocessError) as error:
            raise MissingRequirement(f"{compiler.command[-1]} cannot compile the attention kernel: {error}; {HINT}") from error
        if answer.returncode or not out.is_file():
            lines = answer.stderr.splitlines() or ["no output"]
            first = next((line for line in lines if "error" in line), lines[0])
            reason = f"{compiler.version} cannot compile the attention kernel: {first.strip()}"
            raise MissingRequirement(f"{reason}; install a newer compiler, or set backend.attention=graph")
        with out.open("rb") as stream:
            os.fsync(stream.fileno())
        out.chmod(0o500)
        return out.replace(_path_with_digest(out, folder, name))


def _remove_unused(folder: Path) -> None:
    for path in folder.iterdir():
        with suppress(FileNotFoundError):  # another process removed it
            if time.time() - path.lstat().st_mtime > UNUSED_S:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def _path_with_digest(file: Path, folder: Path, name: str) -> Path:
    return folder / f"{name}-{file_digest(file)}.so"


def cache_folder() -> Path:
    """Return the private folder of compiled kernels, `kvgate/native` in $XDG_CACHE_HOME or ~/.cache; create it if needed.

    Raises UserError if the folder belongs to another user, is accessible to others, or cannot be created.
    """
    fix = "set XDG_CACHE_HOME to a folder of your own, or backend.attention=graph"
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    home = base if base.is_absolute() else Path.home() / ".cache"  # the XDG specification says to ignore a relative path
    folder = home / "kvgate" / "native"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise UserError(f"{error.filename}: compiled kernels cannot be kept there ({error.strerror}); {fix}") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise UserError(f"{folder}: kernels are loaded from this folder, so you must own it and its mode must be 0700; {fix}")
    return folder


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    environment = child_environment()
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment)


def _source(name: str) -> Path:
    return Path(__file__).with_name(name)


@cache
def _processor() -> tuple[str, frozenset[str]]:
    """Return the processor's model and features, the target of -march=native; no features outside Linux on x86-64."""
    cpuinfo = Path("/proc/cpuinfo")
    if platform.machine() != "x86_64" or not cpuinfo.exists():
        return "", frozenset()
    first = cpuinfo.read_text(encoding="utf-8").partition("\n\n")[0]
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in first.splitlines())}
    return fields.get("model name", ""), frozenset(fields.get("flags", "").split())
