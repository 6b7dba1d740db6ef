"""All cache types and arguments of vLLM that kvgate uses are among the facts read from the sources of its releases."""

import json
from contextlib import suppress
from typing import Any

from helpers.engines.interpreter_bundles import config_of
from helpers.engines.vllm_facts import FACTS_FILE, engine_arguments
from helpers.policies.shipped import SHIPPED

from stages.core.errors import UserError
from stages.engines.vllm.backend import PROGRAM, cache_dtype

FACTS: dict[str, dict[str, Any]] = json.loads(FACTS_FILE.read_text(encoding="utf-8"))


def test_every_checked_release_has_our_arguments() -> None:
    assert {release.rpartition(".")[0] for release in FACTS} == set(PROGRAM.checked_releases)
    for facts in FACTS.values():
        assert engine_arguments() == set(facts["EngineArgs"])


def test_every_checked_release_has_the_types_of_the_policies() -> None:
    config, types = config_of("vllm", "python3", dtype="bfloat16"), []
    for policy in SHIPPED.values():
        with suppress(UserError):
            types.append(cache_dtype(policy, config))
    assert len(types) > 5
    for facts in FACTS.values():
        assert set(types) <= set(facts["CacheDType"])
