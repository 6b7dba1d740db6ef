"""Hydra options whose values are defaults in the code, not files of conf/. Importing this module registers them."""

from hydra.core.config_store import ConfigStore

from stages.policies.policy import KVPolicy
from stages.verdict.thresholds import Thresholds

_STORE = ConfigStore.instance()
_STORE.store("default", Thresholds().model_dump(mode="json"), group="gates")
_STORE.store("policy", {name: key.default for name, key in KVPolicy.model_fields.items() if not key.is_required()})
