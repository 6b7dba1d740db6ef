"""The log of moves: one record decides, aliases follow, and what was altered is seen."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from judged_candidates import MemoryRegistry, decide_pass, judged_candidate, proven, replay_without_findings

from pipeline.core.errors import GateRefusal, UserError
from pipeline.registry.promotion import promote, rollback
from pipeline.registry.summary import Candidate
from pipeline.trust.movelog import MoveLog, mover, tags_of


class Killed(BaseException):
    """The process died: nothing after it runs."""


class Dying(MemoryRegistry):
    """Dies at one of its writes; -1 counts them."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.writes, self.dies_at = 0, -1

    def __getattribute__(self, name: str) -> Any:
        if name.startswith(("set_", "delete_")):
            if self.writes == self.dies_at:
                raise Killed
            self.writes += 1
        return super().__getattribute__(name)


@pytest.fixture
def registry(tmp_path: Path) -> Dying:
    return Dying(tmp_path)


def candidate(registry: MemoryRegistry, folder: Path, policy: str, tokens: float = 1.0) -> Candidate:
    return registry.add(judged_candidate(folder, policy, metrics={"memory/max_live_tokens": tokens}))


def put_forward(registry: MemoryRegistry, *candidates: Candidate, log: MoveLog | None = None) -> None:
    promote(candidates, log or MoveLog(registry), replay_without_findings, decide_pass, sweep="s")


def killed_at_every_write(registry: Dying, act: Callable[[], object]) -> list[tuple[dict[str, str], dict[str, str]]]:
    """What the aliases are after `act` died at each of its writes: at once, and after the next command."""
    begin = dict(registry.aliases), {v: dict(t) for v, t in registry.versions.items()}, dict(registry.model)
    found = []
    for at in range(100):
        registry.aliases, registry.model = dict(begin[0]), dict(begin[2])
        registry.versions = {version: dict(tags) for version, tags in begin[1].items()}
        registry.writes, registry.dies_at = 0, at
        try:
            act()
        except Killed:
            left = dict(registry.aliases)
            registry.dies_at = -1
            MoveLog(registry).repair()
            found.append((left, dict(registry.aliases)))
            for record in MoveLog(registry).read().records[-1:]:
                assert all(registry.versions[version].items() >= tags.items() for version, tags in tags_of(record).items())
        else:
            registry.dies_at = -1
            return found
    raise AssertionError("it never ended")


def test_a_promotion_that_is_killed_anywhere_leaves_the_old_aliases_or_the_new_ones(tmp_path: Path, registry: Dying) -> None:
    one, two, three = (candidate(registry, tmp_path, policy) for policy in ("int8", "fp8", "bf16"))
    put_forward(registry, one)
    put_forward(registry, two)
    old, new = {"champion": "2", "previous": "1"}, {"champion": "3", "previous": "2"}
    ends = killed_at_every_write(registry, lambda: put_forward(registry, three))
    bindings, rest = 2, 3  # of both versions; previous, champion, the version's tags
    assert [after for _, after in ends] == [old] * (bindings + 1) + [new] * rest, "the record decides"
    assert all(left["champion"] in ("2", "3") for left, _ in ends)
    assert registry.aliases == new
    assert "promoted_by" in registry.versions["3"]


def test_a_rollback_that_is_killed_anywhere_keeps_a_champion_and_is_completed(tmp_path: Path, registry: Dying) -> None:
    for policy in ("int8", "fp8"):
        put_forward(registry, candidate(registry, tmp_path, policy))
    ends = killed_at_every_write(registry, lambda: rollback(MoveLog(registry), proven))
    old, new = {"champion": "2", "previous": "1"}, {"champion": "1"}
    assert [after for _, after in ends] == [old, old] + [new] * (len(ends) - 2), "the record, after its binding, decides"
    assert "rolled_back_at" in registry.versions["2"]


def test_an_alias_that_somebody_moved_by_hand_is_put_back_and_said(tmp_path: Path, registry: Dying) -> None:
    for policy in ("int8", "fp8"):
        put_forward(registry, candidate(registry, tmp_path, policy))
    registry.aliases = {"champion": "1", "candidate": "2"}
    said: list[str] = []
    MoveLog(registry, say=said.append).repair()
    assert registry.aliases == {"champion": "2", "previous": "1", "candidate": "2"}
    assert said == [
        "the alias previous was nowhere: as the log of moves has it, it points at version 1",
        "the alias champion was at version 1: as the log of moves has it, it points at version 2",
    ]
    del registry.versions["1"], registry.aliases["previous"]
    said.clear()
    MoveLog(registry, say=said.append).repair()
    assert said == ["version 1, where the log of moves has the alias previous, was deleted from the registry"]


def alter(text: str, **changes: object) -> str:
    entry = json.loads(text)
    return json.dumps({**entry, "record": {**entry["record"], **changes}}, sort_keys=True, separators=(",", ":"))


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (
            lambda log: log | {"move-000002": alter(log["move-000002"], by="nobody")},
            "move 3 does not follow from the one before",
        ),
        (lambda log: {name: text for name, text in log.items() if name != "move-000002"}, "move 2 is missing"),
        (lambda log: {name: text for name, text in log.items() if name != "move-000001"}, "move 1 is missing"),
        (lambda log: log | {"move-000003": alter(log["move-000003"], prior="0" * 64)}, "move 3 does not follow"),
        (lambda log: log | {"move-000003": "{"}, "move-000003 cannot be read"),
        (lambda log: log | {"move-000009": log["move-000003"]}, "move 4 is missing"),
    ],
)
def test_a_log_that_was_altered_is_said_and_promotes_nothing_until_that_is_accepted(
    tmp_path: Path, registry: Dying, damage: Callable[[dict[str, str]], dict[str, str]], expected: str
) -> None:
    candidates = [candidate(registry, tmp_path, policy) for policy in ("int8", "fp8", "bf16", "int4")]
    for one in candidates[:3]:
        put_forward(registry, one)
    registry.model = damage(registry.model)
    aliases, said = dict(registry.aliases), list[str]()
    MoveLog(registry, say=said.append).repair()
    assert len(said) == 1
    assert expected in said[0]
    with pytest.raises(GateRefusal, match=rf"the log of moves cannot be trusted: {expected}.*promote.accept_broken_log=true"):
        put_forward(registry, candidates[3])
    assert registry.aliases == aliases
    put_forward(registry, candidates[3], log=MoveLog(registry, accept_broken=True))
    after = MoveLog(registry).read()
    assert after.problem is None
    assert registry.aliases == {"champion": "4", "previous": "3"}


@pytest.mark.parametrize("moves", [1, 3])
@pytest.mark.parametrize("changes", [{"aliases": {"champion": "4"}}, {"by": "nobody"}, {"reports": {}}, {"aliases": {}}])
def test_the_last_record_is_bound_to_what_it_moved(
    tmp_path: Path, registry: Dying, moves: int, changes: dict[str, Any]
) -> None:
    candidates = [candidate(registry, tmp_path, policy) for policy in ("int8", "fp8", "bf16", "int4")]
    for one in candidates[:moves]:
        put_forward(registry, one)
    assert MoveLog(registry).read().problem is None
    registry.model[f"move-{moves:06}"] = alter(registry.model[f"move-{moves:06}"], **changes)
    aliases = dict(registry.aliases)
    with pytest.raises(GateRefusal, match=f"move {moves}: .* does not hold its digest: it was altered"):
        put_forward(registry, candidates[3])
    assert registry.aliases == aliases, "nobody follows it"


def test_the_last_record_that_binds_a_gate_policy_is_bound_too(registry: Dying) -> None:
    log = MoveLog(registry)
    with log.changing() as history:
        log.append(history, "policy", "", policy="a" * 64)
    assert log.read().problem is None
    registry.model["move-000001"] = alter(registry.model["move-000001"], policy="b" * 64)
    assert str(log.read().problem).startswith("move 1: the registered model does not hold its digest")


def test_the_way_back_waits_for_no_log_and_says_so_in_it(tmp_path: Path, registry: Dying) -> None:
    for policy in ("int8", "fp8"):
        put_forward(registry, candidate(registry, tmp_path, policy))
    registry.model["move-000001"] = alter(registry.model["move-000001"], by="nobody")
    rollback(MoveLog(registry), proven)
    assert registry.aliases == {"champion": "1"}
    assert MoveLog(registry).read().records[-1].mends == "move 2 does not follow from the one before: one of them was altered"


def test_a_registry_whose_aliases_are_older_than_its_log_keeps_them(tmp_path: Path, registry: Dying) -> None:
    older = candidate(registry, tmp_path, "int8")
    registry.aliases = {"champion": "1"}
    put_forward(registry, candidate(registry, tmp_path, "fp8", tokens=2.0), older)
    assert registry.aliases == {"champion": "2", "previous": "1"}


def test_another_host_that_wrote_the_same_record_is_noticed(tmp_path: Path) -> None:
    class Raced(MemoryRegistry):
        def set_model_tag(self, name: str, text: str) -> None:
            super().set_model_tag(name, alter(text, by="another host"))

    raced = Raced(tmp_path)
    with pytest.raises(GateRefusal, match="another host moved the aliases meanwhile: move 1 is not ours"):
        put_forward(raced, candidate(raced, tmp_path, "fp8"))
    assert raced.aliases == {}


def test_a_record_that_no_database_column_holds_is_refused(registry: Dying) -> None:
    log = MoveLog(registry)
    with log.changing() as history, pytest.raises(UserError, match="one command moves too much"):
        log.append(history, "route", "", aliases={f"route-{number}": "1" for number in range(1000)})
    assert registry.model == {}


def test_a_move_says_who_made_it_and_never_a_password() -> None:
    github = {"GITHUB_SERVER_URL": "https://github.com", "GITHUB_REPOSITORY": "a/b", "GITHUB_RUN_ID": "7"}
    assert mover(github) == "https://github.com/a/b/actions/runs/7"
    assert mover({"CI_JOB_URL": "https://u:secret@ci/job/1"}) == "https://***@ci/job/1"
    assert "@" in mover({}) or mover({}).startswith("uid")
