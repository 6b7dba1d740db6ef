"""`KVPolicy` as programs make it: what is wrong with a policy is said as everything that is given wrongly."""

from typing import Any

from pydantic import ValidationError

from pipeline.core import kv
from pipeline.core.errors import UserError


class KVPolicy(kv.KVPolicy):
    """A policy of one's own, with the keys of `kv.*`. Raises UserError, a line for each problem."""

    def __new__(cls, **values: Any) -> Any:
        try:
            return kv.KVPolicy(**values)
        except ValidationError as error:
            problems = [(".".join(map(str, one["loc"])), one["msg"]) for one in error.errors(include_url=False)]
            raise UserError("\n".join(f"KVPolicy.{key}: {said[0].lower()}{said[1:]}" for key, said in problems)) from None
