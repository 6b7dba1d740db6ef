"""All arguments that kvgate passes to vLLM, and vLLM's rules that kvgate repeats, are among the recorded facts."""

from contextlib import suppress
from typing import Any

from helpers.engines.interpreter_bundles import config_of
from helpers.engines.vllm_facts import CALLED, RULES, SAMPLING, engine_arguments, recorded
from helpers.policies.shipped import SHIPPED

from stages.core.errors import UserError
from stages.engines.vllm.audit import AUDITED_RELEASES
from stages.engines.vllm.backend import PROGRAM, cache_dtype

FACTS: dict[str, dict[str, Any]] = recorded()


def facts_of(series: str) -> dict[str, Any]:
    (matching,) = [facts for release, facts in FACTS.items() if release.startswith(f"{series}.")]
    return matching


def test_every_checked_release_has_our_arguments_and_functions() -> None:
    assert {release.rpartition(".")[0] for release in FACTS} == set(PROGRAM.checked_releases)
    for facts in FACTS.values():
        assert engine_arguments() == set(facts["EngineArgs"])
        assert set(SAMPLING) == set(facts["SamplingParams"])
        assert {name for names in CALLED.values() for name in names} == set(facts["called"])
        assert {name for names in RULES.values() for name in names} == set(facts["rules"])


def test_audited_releases_have_the_same_types_and_rules() -> None:
    config, types = config_of("vllm", "python3", dtype="bfloat16"), []
    for policy in SHIPPED.values():
        with suppress(UserError):
            types.append(cache_dtype(policy, config))
    assert len(types) > 5
    first = facts_of(AUDITED_RELEASES[0])
    for facts in map(facts_of, AUDITED_RELEASES):
        assert set(types) <= set(facts["CacheDType"])
        assert (facts["rules"], facts["called"]) == (first["rules"], first["called"])
