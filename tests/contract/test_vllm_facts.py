"""All arguments that kvgate passes to vLLM, and vLLM's rules that kvgate repeats, are among the recorded facts."""

from typing import Any

import pytest
from helpers.engines.interpreter_bundles import config_of
from helpers.engines.vllm_facts import CALLED, RULES, SAMPLING, engine_arguments, recorded
from helpers.policies.shipped import SHIPPED

from stages.core.errors import UserError
from stages.engines.vllm.audit import RELEASES
from stages.engines.vllm.backend import PROGRAM, cache_dtype

FACTS: dict[str, dict[str, Any]] = recorded()


def facts_of(series: str) -> dict[str, Any]:
    (found,) = [facts for release, facts in FACTS.items() if release.startswith(f"{series}.")]
    return found


def test_every_release_that_was_read_is_recorded_and_no_other() -> None:
    assert {release.rpartition(".")[0] for release in FACTS} == set(PROGRAM.read)


@pytest.mark.parametrize("series", PROGRAM.read)
def test_a_release_takes_every_argument_and_has_every_function(series: str) -> None:
    facts = facts_of(series)
    assert engine_arguments() == set(facts["EngineArgs"])
    assert set(SAMPLING) == set(facts["SamplingParams"])
    assert {name for names in CALLED.values() for name in names} == set(facts["called"])
    assert {name for names in RULES.values() for name in names} == set(facts["rules"])


@pytest.mark.parametrize("series", RELEASES)
def test_a_release_knows_the_type_of_every_policy_that_the_backend_takes(series: str) -> None:
    config, types = config_of("vllm", "python3", dtype="bfloat16"), []
    for policy in SHIPPED.values():
        try:
            types.append(cache_dtype(policy, config))
        except UserError:
            continue
    assert len(types) > 5
    assert set(types) <= set(facts_of(series)["CacheDType"])


@pytest.mark.parametrize("series", RELEASES[1:])
def test_the_rules_that_the_audit_and_the_worker_repeat_are_the_same_in_its_releases(series: str) -> None:
    first, other = facts_of(RELEASES[0]), facts_of(series)
    assert other["rules"] == first["rules"]
    assert other["called"] == first["called"]
