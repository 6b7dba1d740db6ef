"""Errors that a person or CI can act on, and their exit codes. Any other exception is a defect of kvgate: exit code 1."""

import errno
from collections.abc import Sequence

from pipeline.core.redaction import printable, redact_text


class UserError(ValueError):
    """Bad input. The message has one line for each problem, which names the key, the value and the fix."""


class GateRefusal(Exception):
    """A gate refused the candidate, or the replayed evidence differs from what was judged. Nothing was promoted."""


class CannotBeJudged(GateRefusal):
    """The baseline itself gets kinds of work wrong: nothing would show what a candidate loses of them."""

    def __init__(self, message: str, weak: Sequence[str], able: Sequence[str]) -> None:
        super().__init__(message)
        self.weak, self.able = weak, able


class MissingRequirement(Exception):
    """This machine lacks something. The message names it and how to get it."""


EXIT_CODES: dict[type[Exception], int] = {UserError: 2, GateRefusal: 3, MissingRequirement: 4}
DEFECT = 1
INTERRUPTED = 130
"""Ctrl-C or SIGTERM, as shells number it."""

SEVERITY = (0, 3, 4, 2, INTERRUPTED, DEFECT)
"""Exit codes from good to bad. A sweep exits with the worst code of its jobs."""

REFUSALS = tuple(EXIT_CODES)


OF_THE_MACHINE = (OSError, MemoryError)
"""Exceptions of Python's own that a machine causes: it lacks room, a permission, memory."""
OF_INPUT = (RecursionError, UnicodeError)
"""Those that input causes: nested too deep for a parser, or no text."""
STORES = ("mlflow", "sqlalchemy", "sqlite3", "alembic", "psycopg", "psycopg2", "pymysql")
"""Libraries whose exceptions say what is wrong with the tracking store."""
CLUSTERS = ("submitit",)
"""Libraries that raise within a job when the cluster ends it: its time is over."""

OS_FIXES = {
    errno.ENOSPC: "free some room there, or give another workdir",
    errno.EDQUOT: "free some room there, or give another workdir",
    errno.EFBIG: "free some room there, or give another workdir",
    errno.EACCES: "give this user the permission, or another path",
    errno.EPERM: "give this user the permission, or another path",
    errno.EROFS: "give a path that can be written to",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "raise the limit of open files (ulimit -n)",
    errno.ENAMETOOLONG: "give a shorter path",
    errno.EIO: "the disk failed; give a path on another one",
    errno.ENOTDIR: "move away what lies there, or give another path",
    errno.EISDIR: "move away what lies there, or give another path",
}
"""What to do, by the number of an OSError."""


DEBUG_VARIABLE = "KVGATE_DEBUG"
"""Environment variable: 1 shows where an exception came from that is no refusal."""


def exit_code(error: BaseException) -> int:
    known = next((code for kind, code in EXIT_CODES.items() if isinstance(error, kind)), None)
    if known is not None:
        return known
    if isinstance(error, OF_INPUT):
        return EXIT_CODES[UserError]
    if isinstance(error, OF_THE_MACHINE) or _is_of(STORES, error) or _is_of(CLUSTERS, error):
        return EXIT_CODES[MissingRequirement]
    return DEFECT


def describe(error: BaseException) -> str:
    """Return what a person is told of the exception that ends a process: a line for each problem, without secrets."""
    if isinstance(error, REFUSALS):
        return str(error)
    detail = " ".join(redact_text(str(error)).split())[:500]
    text = f"{type(error).__name__}: {detail}" if detail else type(error).__name__
    hint = "KVGATE_DEBUG=1 shows where"
    if isinstance(error, OSError) and not _is_of(STORES, error):
        named = error.filename2 or error.filename  # of a copy the second is what is written
        place = f"{named}: " if named is not None else ""
        fix = OS_FIXES.get(error.errno or 0, f"make it usable and run it again; {hint}")
        return redact_text(f"{place}{error.strerror or detail or type(error).__name__}; {fix}")
    if isinstance(error, MemoryError):
        return "this machine's memory is used up; free some, or lower workloads.batch_size and workloads.load"
    if isinstance(error, OF_INPUT):
        return f"an input is nested too deep, or is no text ({text}); correct it; {hint}"
    for libraries, said in (
        (
            CLUSTERS,
            f"the cluster ended this job ({detail}); raise hydra.launcher.timeout_min or max_num_timeout, and run it again",
        ),
        (STORES, f"the tracking store failed ({text}); make it usable, or use tracking=none; {hint}"),
    ):
        if _is_of(libraries, error):
            return said
    return f"a defect of kvgate ({text}); {hint}: please report it"


def _is_of(libraries: tuple[str, ...], error: BaseException) -> bool:
    return any(kind.__module__.partition(".")[0] in libraries for kind in type(error).__mro__)


def short(value: object, most: int = 60) -> str:
    """Return a value of a file as a message shows it: in one line of at most so many characters."""
    if isinstance(value, int) and abs(value) >= 1 << 64:
        return "an integer of many digits"
    text = printable(str(value))
    return text if len(text) <= most else f"{text[: most - 3]}..."
