"""The KV policies of conf/kv, by name, for stages that compare several."""

from collections.abc import Sequence

from omegaconf import OmegaConf

from pipeline.config.compose import CONF, suggest
from pipeline.core.errors import UserError
from pipeline.core.kv import KVPolicy


def load_policies(key: str, names: Sequence[str]) -> list[KVPolicy]:
    """Return the policies of conf/kv with these names.

    Raises UserError, naming the key that lists them, for a name that is not there.
    """
    known = sorted(path.stem for path in (CONF / "kv").glob("*.yaml"))
    for name in names:
        if name not in known:
            raise UserError(f"{key}={name}: no such policy in conf/kv{suggest(name, known)}")
    return [KVPolicy.model_validate(OmegaConf.to_container(OmegaConf.load(CONF / "kv" / f"{name}.yaml"))) for name in names]


def policy_yaml(policy: KVPolicy, comment: str) -> str:
    """Return a policy as a file of conf/kv, below a comment of one line."""
    return f"# {comment}\n{OmegaConf.to_yaml(OmegaConf.create(policy.model_dump(mode='json')))}"
