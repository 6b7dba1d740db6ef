"""All cache types and arguments of vLLM that kvgate uses are among the facts read from the sources of its releases."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from helpers.engines.interpreter_bundles import config_of
from helpers.policies.shipped import SHIPPED

from stages.core.errors import UserError
from stages.engines.vllm.backend import PROGRAM, cache_dtype, engine_args
from stages.engines.vllm.engine import EVALUATION_ARGS

FACTS: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "facts" / "vllm.json").read_text(encoding="utf-8"))


def test_every_checked_release_has_our_arguments() -> None:
    serving = engine_args(config_of("vllm", "python3", kv_cache_gib=1), "auto", ["0"])
    assert {release.rpartition(".")[0] for release in FACTS} == set(PROGRAM.checked_releases)
    for facts in FACTS.values():
        assert {"model", *serving, *EVALUATION_ARGS, "num_gpu_blocks_override"} == set(facts["EngineArgs"])


def test_every_checked_release_has_the_types_of_the_policies() -> None:
    config, types = config_of("vllm", "python3", dtype="bfloat16"), []
    for policy in SHIPPED.values():
        with suppress(UserError):
            types.append(cache_dtype(policy, config))
    assert len(types) > 5
    for facts in FACTS.values():
        assert set(types) <= set(facts["CacheDType"])
