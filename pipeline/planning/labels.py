"""Names of policies as the command line gives them: the file of conf/, and what differs from it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pipeline.core.kv import KVPolicy
from pipeline.core.overrides import written


def labelled(shipped: Sequence[KVPolicy], others: Sequence[KVPolicy]) -> list[tuple[str, KVPolicy]]:
    """Return all distinct policies with display names, those of conf/ first.

    The name of a policy that was changed on the command line says how: `fp8 kv.sink_tokens=4`.
    """
    by_name = {policy.name: policy for policy in shipped}
    found = list(by_name.items())
    for policy in others:
        if any(policy == known for _, known in found):
            continue
        origin = by_name.get(policy.name)
        changes = () if origin is None else _changes(origin.model_dump(mode="json"), policy.model_dump(mode="json"), "kv")
        found.append((" ".join([policy.name, *changes]), policy))
    return found


def _changes(origin: Mapping[str, Any], changed: Mapping[str, Any], place: str) -> Iterator[str]:
    for key, value in changed.items():
        before = origin.get(key)
        if value == before:
            continue
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            yield from _changes(before, value, f"{place}.{key}")
        else:
            yield f"{place}.{key}={written(value)}"
