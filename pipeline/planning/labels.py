"""Names of policies as the command line gives them: the file of conf/, and what differs from it."""

from collections.abc import Sequence

from pipeline.core.kv import KVPolicy
from pipeline.core.overrides import differing


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
        changes = [] if origin is None else differing("kv", policy.model_dump(mode="json"), origin.model_dump(mode="json"))
        found.append((" ".join([policy.name, *(change.lstrip("+") for change in changes)]), policy))
    return found
