"""Errors that a person or CI can act on, and their exit codes. Any other exception is a defect of kvgate: exit code 1."""


class UserError(ValueError):
    """Bad input. The message has one line for each problem, which names the key, the value and the fix."""


class GateRefusal(Exception):
    """A gate refused the candidate, or the replayed evidence differs from what was judged. Nothing was promoted."""


class MissingRequirement(Exception):
    """This machine lacks something. The message names it and how to get it."""


EXIT_CODES: dict[type[Exception], int] = {UserError: 2, GateRefusal: 3, MissingRequirement: 4}
DEFECT = 1
INTERRUPTED = 130
"""Ctrl-C or SIGTERM, as shells number it."""

SEVERITY = (0, 3, 4, 2, INTERRUPTED, DEFECT)
"""Exit codes from good to bad. A sweep exits with the worst code of its jobs."""

REFUSALS = tuple(EXIT_CODES)


def exit_code(error: BaseException) -> int:
    """Return the exit code of a process that `error` ends."""
    return next((code for kind, code in EXIT_CODES.items() if isinstance(error, kind)), DEFECT)
