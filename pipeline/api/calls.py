"""What every function of the API does alike: a configuration from Python's values, and errors as one exception each."""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from pydantic import ValidationError

from pipeline.config.compose import plan
from pipeline.config.config import Config
from pipeline.core import kv
from pipeline.core.errors import EXIT_CODES, REFUSALS, UserError, describe, exit_code
from pipeline.core.overrides import written


class KVPolicy(kv.KVPolicy):
    """A policy of one's own, with the keys of `kv.*`. Raises UserError, a line for each problem."""

    def __new__(cls, **values: Any) -> Any:
        try:
            return kv.KVPolicy(**values)
        except ValidationError as error:
            problems = [(".".join(map(str, one["loc"])), one["msg"]) for one in error.errors(include_url=False)]
            raise UserError("\n".join(f"KVPolicy.{key}: {said[0].lower()}{said[1:]}" for key, said in problems)) from None


P = ParamSpec("P")
R = TypeVar("R")


def raises_refusals(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function raise what a person can act on as one exception, without those that it was made from.

    What the machine or the tracking store did is such an exception too, as on the command line. Defects stay what they are.
    """

    @wraps(function)
    def call(*arguments: P.args, **options: P.kwargs) -> R:
        try:
            return function(*arguments, **options)
        except REFUSALS as error:
            raise error.with_traceback(None) from None
        except Exception as error:
            kind = next((kind for kind, code in EXIT_CODES.items() if code == exit_code(error)), None)
            if kind is None:
                raise
            raise kind(describe(error)) from error

    return call


def compose(values: Mapping[str, object]) -> Config:
    """Compose and validate a configuration, as the command line does of `KEY=VALUE`.

    Raises:
        UserError: a line for each problem.
    """
    return plan([f"{key}={written(value, key)}" for key, value in values.items()], multirun=False).jobs[0]
