"""Strict reading of user input and bundles: records without unknown keys or NaN, and regular files only."""

import errno
import json
import os
import re
import stat
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError
from pydantic_core import PydanticCustomError

from stages.core.errors import UserError

CONTROLS = r"\p{C}\p{Zl}\p{Zp}"
"""Character classes that are forbidden in names: control characters, formatting characters, line ends."""


class StrictModel(BaseModel):
    """A pydantic model without type coercion, whose error texts hide the values, since these may be secrets."""

    model_config = ConfigDict(
        defer_build=True, extra="forbid", strict=True, frozen=True, allow_inf_nan=False, hide_input_in_errors=True
    )


def check_path(text: str) -> str:
    """Return the path that the user gave. Raises PydanticCustomError if it cannot be a path on this machine."""
    if not text.strip():
        raise PydanticCustomError("no_path", "is empty; give a path, or leave the key out")
    if re.match(r"[a-z][\w.+-]*://", text, re.IGNORECASE) and not text.startswith("pkg://"):
        raise PydanticCustomError("no_path", "is a URL; give a path on this machine")
    if not text.isprintable():
        raise PydanticCustomError("no_path", "has characters that cannot be printed; give another path")
    try:
        os.lstat(Path(text).expanduser())
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise PydanticCustomError("no_path", "is too long for a path; give a shorter one") from None
    except RuntimeError:  # ~name of an unknown user
        raise PydanticCustomError("no_path", "starts with ~ and an unknown user; give the full path") from None
    return text


PathText = Annotated[str, AfterValidator(check_path)]


def absolute_path(path: str) -> Path:
    """Return the user's path as an absolute path with links resolved; a link to itself is returned as is."""
    try:
        return Path(os.path.realpath(Path(path).expanduser()))
    except RuntimeError:  # ~name of an unknown user
        return Path(os.path.realpath(path))


LFS_POINTER = b"version https://git-lfs"


class Unreadable(ValueError):
    """A file that cannot be used. The message states the problem and the fix; the caller adds the file's name."""


def first_problem(error: ValidationError, record_name: str = "the file") -> str:
    """Return the first problem of a record as "KEY: problem"; `record_name` replaces KEY if the whole record is wrong.

    Unknown keys come first, because a misspelled key also causes the problem that the correct key is missing.
    """
    first = min(error.errors(include_url=False), key=lambda problem: problem["type"] != "extra_forbidden")
    return f"{'.'.join(map(str, first['loc'])) or record_name}: {first['msg'].removeprefix('Value error, ')}"


MAX_TEXT_BYTES = 1 << 30
"""Maximum bytes of a file of samples or texts."""


def read_file(path: Path, max_bytes: int) -> bytes:
    """Return the content of the user's regular file. Pipes and devices are refused, since reading them might never end.

    Raises Unreadable if the file is missing, not a regular file, too large, or not readable.
    """
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as stream:
            status = os.fstat(stream.fileno())
            if stat.S_ISDIR(status.st_mode):
                raise Unreadable("is a directory; give a file")
            if not stat.S_ISREG(status.st_mode):
                raise Unreadable("is a pipe, a socket or a device; give a file")
            if status.st_size > max_bytes:
                raise Unreadable(f"has {status.st_size:,} bytes; such a file should have {max_bytes:,} at most")
            content = stream.read(max_bytes + 1)
    except FileNotFoundError:
        raise Unreadable("no such file; give one that exists") from None
    except OSError as error:
        raise Unreadable(f"cannot be read ({error.strerror}); give a readable file") from None
    refuse_pointer(content)
    return content


def refuse_pointer(content: bytes) -> None:
    """Raise Unreadable if a file is a Git LFS pointer, which a clone without LFS has instead of the content."""
    if content.startswith(LFS_POINTER):
        raise Unreadable("is a pointer of Git LFS, not the file itself; run git lfs pull")


def read_user_file(key: str, path: Path) -> bytes:
    """Return the content of the user's file that `key` names, for samples or texts. Raises UserError if `read_file` fails."""
    try:
        return read_file(path, MAX_TEXT_BYTES)
    except Unreadable as error:
        raise UserError(f"{key}={path}: {error}") from None


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object as a dict. Raises ValueError for a repeated key, because readers disagree on which value counts."""
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("a key occurs twice")
    return members


def refuse_constant(name: str) -> None:
    """Raise ValueError for NaN or Infinity, which Python's json module would accept (its `parse_constant`)."""
    raise ValueError(f"{name} is no number in JSON")


def parse_json(content: bytes) -> Any:
    """Return the value in the user's JSON file.

    Raises Unreadable if the content is not JSON, is nested too deeply, or has invalid text or a number out of range.
    """
    try:
        value = json.loads(content.decode("utf-8"), object_pairs_hook=unique_keys, parse_constant=refuse_constant)
        # Raises for half of a surrogate pair, and for a number like 1e999, which Python would read and write as infinite.
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8")
    except UnicodeEncodeError:
        raise Unreadable("holds half of a surrogate pair, which is not text; correct it") from None
    except UnicodeDecodeError:
        raise Unreadable("is not UTF-8; give a text in UTF-8") from None
    except RecursionError:
        raise Unreadable("is nested too deeply; correct it") from None
    except ValueError as error:  # not JSON, or an integer of thousands of digits
        raise Unreadable(f"is not JSON ({error}); correct it") from None
    return value
