"""The options of conf/: the shipped KV policies, and the questions and texts that suit a model (`auto`)."""

from collections.abc import Sequence
from functools import cache

from omegaconf import OmegaConf

from pipeline.config import CONF
from pipeline.config.override_syntax import differing
from stages.core.errors import UserError
from stages.policies.policy import KVPolicy

AUTO = "auto"
AUTO_OPTIONS = {"workloads": ("builtin", "chat"), "calibration": ("generated", "chat")}
"""Group -> (option for the tiny model, option for any other model). An unresolved `auto` has the values of the first option."""
TINY = "pkg://stages.tiny/checkpoint"


@cache
def shipped_policy(name: str) -> KVPolicy:
    """Return the policy of conf/kv with the given name."""
    return KVPolicy.model_validate(OmegaConf.to_container(OmegaConf.load(CONF / "kv" / f"{name}.yaml")))


def check_name(policy: KVPolicy, title: str) -> None:
    """Refuse a policy that differs from the shipped one of its name, unless its display name includes the difference."""
    if title != policy.name and "kv.name=" not in title:  # the display name includes the difference
        return
    if (CONF / "kv" / f"{policy.name}.yaml").is_file() and policy != shipped_policy(policy.name):
        raise UserError(f"kv.name={policy.name}: is the name of a shipped policy with other formats; give another name")


def labelled(others: Sequence[KVPolicy]) -> list[tuple[str, KVPolicy]]:
    """Return the shipped policies, then the unshipped policies from `others`, with display names.

    The display name of a policy that was changed on the command line includes the change: `fp8 kv.sink_tokens=4`. So does the
    display name of a policy that differs from an earlier policy of the same name.
    """
    by_name = {path.stem: shipped_policy(path.stem) for path in sorted((CONF / "kv").glob("*.yaml"))}
    policies = list(by_name.items())
    for policy in others:
        if any(policy == shipped for _, shipped in policies):
            continue
        origin = by_name.setdefault(policy.name, policy)
        changes = differing("kv", policy.model_dump(mode="json"), origin.model_dump(mode="json"))
        policies.append((" ".join([policy.name, *changes]), policy))
    return policies
