"""Shared code of the API: it composes a configuration from Python values, and raises each error as one exception."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import ParamSpec, TypeVar

from pydantic_core import PydanticCustomError

from pipeline.config.compose import Plan, plan
from pipeline.config.override_syntax import written
from stages.core.errors import EXIT_CODES, Refusal, UserError, describe, exit_code, short
from stages.core.strict import check_path

P = ParamSpec("P")
R = TypeVar("R")


def raises_refusals(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function so that every error that the caller can act on is raised as a `Refusal`.

    A Refusal is raised without its traceback and causes. An error of the machine or the tracking store becomes the kind
    of Refusal whose exit code the command line would return; its cause is the original error. Defects are raised unchanged.
    """

    @wraps(function)
    def call(*arguments: P.args, **options: P.kwargs) -> R:
        try:
            return function(*arguments, **options)
        except Refusal as error:
            raise error.with_traceback(None) from None
        except Exception as error:
            kind = next((kind for kind, code in EXIT_CODES.items() if code == exit_code(error)), None)
            if kind is None:
                raise
            raise kind(describe(error)) from error

    return call


def path_argument(name: str, value: object) -> Path:
    """Return a path argument with `~` expanded. Raises UserError if it cannot be a path on this machine."""
    if not isinstance(value, str | Path):
        raise UserError(f"{name}={value!r}: is not a path; give one as text or as a Path")
    try:
        return Path(check_path(str(value))).expanduser()
    except PydanticCustomError as error:
        raise UserError(f"{name}={short(str(value), 200)}: {error.message()}") from None


def plan_call(values: Mapping[str, object]) -> Plan:
    """Plan a job from Python values, as the command line does from `KEY=VALUE`. Raises UserError, a line per problem."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value and "." not in key:
            raise UserError(
                f"{key}={value}: pass the name of an option, or the keys one by one, as in **{{'{key}.KEY': VALUE}}"
            )
    planned = plan([f"{key}={written(value, key)}" for key, value in values.items()], multirun=False)
    return replace(planned, arguments=None, sweeping=False)
