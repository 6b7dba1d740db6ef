"""Errors that a person or CI can act on, and the exit code that each becomes. Anything else is a defect: 1."""


class UserError(ValueError):
    """Bad input: one line a problem, naming the key, the value and the fix."""


class GateRefusal(Exception):
    """A gate said no: nothing was promoted."""


class MissingRequirement(Exception):
    """Something this machine does not have: the message names it and how to get it."""


EXIT_CODES: dict[type[Exception], int] = {UserError: 2, GateRefusal: 3, MissingRequirement: 4}
DEFECT = 1
INTERRUPTED = 130
"""Ctrl-C or SIGTERM, as shells number it."""

SEVERITY = (0, 3, 4, 2, INTERRUPTED, DEFECT)
"""Exit codes from good to bad: a sweep's is the worst of its jobs'."""

REFUSALS = tuple(EXIT_CODES)


def exit_code(error: BaseException) -> int:
    """The process's exit code for an error that ends it."""
    return next((code for kind, code in EXIT_CODES.items() if isinstance(error, kind)), DEFECT)
