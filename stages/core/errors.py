"""Errors that a user or CI can act on, with their exit codes. Any other exception is a bug in kvgate (exit code 1)."""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from traceback import walk_tb

from stages.core.digest import FIRST_PARTY
from stages.core.redaction import printable, redact_text


class Refusal(Exception):
    """Base class of the errors that a user or CI can act on."""


class UserError(Refusal, ValueError):
    """Bad input. The message has one line per problem with the key, the value and the fix."""


class GateRefusal(Refusal):
    """The negative result of a valid command: a failed gate, evidence that differs, or no policy that meets the goal.

    Something may still have changed: a monitor raises this error after it has moved a route back.
    """


class MissingRequirement(Refusal):
    """A requirement that this machine lacks. The message names the requirement and how to get it."""


EXIT_CODES: dict[type[Refusal], int] = {UserError: 2, GateRefusal: 3, MissingRequirement: 4}
DEFECT = 1
INTERRUPTED = 130
"""Exit code after Ctrl-C or SIGTERM, as in shells."""

SEVERITY = (0, 3, 4, 2, INTERRUPTED, DEFECT)
"""Exit codes from good to bad. A sweep exits with the worst code of its jobs."""


MACHINE_ERRORS = (OSError, MemoryError)
"""Built-in exceptions that the machine causes: missing disk space, permission or memory."""
INPUT_ERRORS = (RecursionError, UnicodeError)
"""Built-in exceptions that input causes: nesting too deep for a parser, or invalid text."""
STORES = ("mlflow", "sqlalchemy", "sqlite3", "alembic", "psycopg", "psycopg2", "pymysql")
"""Libraries whose exceptions mean that the tracking store failed."""
CLUSTERS = ("submitit",)
"""Libraries that raise in the middle of a job when the cluster ends the job, for example at its time limit."""

OS_FIXES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "free some room there, or give another workdir or TMPDIR"),
    **dict.fromkeys((errno.EACCES, errno.EPERM), "give this user the permission, or another path"),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "raise the limit of open files (ulimit -n)"),
    **dict.fromkeys((errno.ENOTDIR, errno.EISDIR), "move the file or folder that is in the way, or give another path"),
    errno.EROFS: "give a path that can be written to",
    errno.ENAMETOOLONG: "give a shorter path",
    errno.EIO: "the disk failed; give a path on another one",
}


DEBUG_VARIABLE = "KVGATE_DEBUG"
"""Environment variable; 1 shows the traceback of an unexpected exception."""


def exit_code(error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt | SystemExit):
        return INTERRUPTED
    code_of_kind = next((code for kind, code in EXIT_CODES.items() if isinstance(error, kind)), None)
    if code_of_kind is not None:
        return code_of_kind
    if isinstance(error, INPUT_ERRORS):
        return EXIT_CODES[UserError]
    if isinstance(error, MACHINE_ERRORS) or _raised_by((*STORES, *CLUSTERS), error):
        return EXIT_CODES[MissingRequirement]
    return EXIT_CODES[UserError] if refused_variables(error) else DEFECT


def describe(error: BaseException) -> str:
    """Return the message for the exception that ended a process, one line per problem. A Refusal's text is not redacted."""
    if isinstance(error, Refusal):
        return str(error)
    detail = " ".join(redact_text(str(error)).split())[:500]
    text = f"{type(error).__name__}: {detail}" if detail else type(error).__name__
    hint = "KVGATE_DEBUG=1 shows where"
    if isinstance(error, OSError) and not _raised_by(STORES, error):
        filename = error.filename2 or error.filename  # filename2 is the target of a copy, which is written
        if filename is None and isinstance(error, FileNotFoundError):  # of os.getcwd()
            filename = "the current directory"
        place = f"{filename}: " if filename is not None else ""
        fix = OS_FIXES.get(error.errno or 0, f"make it usable and run it again; {hint}")
        return redact_text(f"{place}{error.strerror or detail or type(error).__name__}; {fix}")
    if isinstance(error, MemoryError):
        return "this machine's memory is used up; free some, or lower workloads.batch_size and workloads.load"
    if isinstance(error, INPUT_ERRORS):
        return f"an input is nested too deeply, or is not text ({text}); correct it; {hint}"
    if _raised_by(STORES, error):
        return f"the tracking store failed ({text}); make it usable, or use tracking=none; {hint}"
    ended = f"the cluster ended this job ({detail}); raise hydra.launcher.timeout_min, and run it again to continue"
    variables = " and ".join(refused_variables(error))
    refused = f"{variables}: a library refuses this environment variable ({text}); correct or unset it"
    defect = f"a defect of kvgate ({text}); {hint}: please report it"
    return ended if _raised_by(CLUSTERS, error) else refused if variables else defect


def _raised_by(libraries: tuple[str, ...], error: BaseException) -> bool:
    return any(kind.__module__.partition(".")[0] in libraries for kind in type(error).__mro__)


def refused_variables(error: BaseException) -> list[str]:
    """Return the environment variables that a library refused, often while it was imported.

    The exception quotes their values, and the library's code around the exception, or the exception, has their names.
    """
    frames = [frame for frame, _ in walk_tb(error.__traceback__)][-3:]
    if not frames or str(frames[-1].f_globals.get("__name__")).partition(".")[0] in FIRST_PARTY:
        return []
    texts = [text for frame in frames for text in (*frame.f_code.co_consts, *frame.f_globals.values()) if isinstance(text, str)]
    names = {*texts, *re.findall(r"\w+", str(error))}.intersection(name for name, value in os.environ.items() if value)
    return sorted(name for name in names if re.search(rf"(?<!\w){re.escape(os.environ[name])}(?!\w)", str(error)))


def short(value: object, max_characters: int = 60) -> str:
    """Return a value for a message: printable, on one line of at most `max_characters` characters."""
    if isinstance(value, int) and abs(value) >= 1 << 64:
        return "an integer of many digits"
    text = printable(str(value))
    return text if len(text) <= max_characters else f"{text[: max_characters - 3]}..."


@contextmanager
def required_libraries() -> Iterator[None]:
    """Turn the error for a missing library into MissingRequirement. A missing first-party module stays a defect."""
    try:
        yield
    except ModuleNotFoundError as error:
        library = str(error.name).partition(".")[0]
        if library in FIRST_PARTY:
            raise
        raise MissingRequirement(f"{library} is not installed here: pip install {library}") from error
