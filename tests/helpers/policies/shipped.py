"""Contents of conf/: its YAML files, and its KV policies by name."""

from pathlib import Path
from typing import Any

import yaml

from stages.policies.policy import KVPolicy

CONF = Path(__file__).parents[3] / "conf"


def conf(group: str, name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((CONF / group / f"{name}.yaml").read_text(encoding="utf-8"))
    return loaded


SHIPPED = {path.stem: KVPolicy.model_validate(conf("kv", path.stem)) for path in sorted((CONF / "kv").glob("*.yaml"))}
