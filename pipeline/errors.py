"""Errors that a user can act on; the command line maps each to an exit code."""


class UserError(ValueError):
    """Bad input: one line that names the key, the value and the fix (exit 2)."""


class GateRefusal(Exception):
    """A gate said no: nothing was promoted (exit 3)."""


class MissingRequirement(Exception):
    """Something this machine does not have: the message names it and how to get it (exit 4)."""
