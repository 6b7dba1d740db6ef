"""Promotions, rollbacks and routes that are killed before any of their writes and then repeated."""

import os
import socket
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from helpers.registry.candidates import MemoryRegistry, engines_of, judged_candidate

from pipeline.registry import promotion
from pipeline.registry.promotion import mover
from pipeline.registry.routing import Move, Route, make_moves, route_of
from stages.core.errors import UserError
from stages.verdict.candidate import Candidate


class Killed(BaseException):
    """Raised to simulate the death of the process."""


class Dying(MemoryRegistry):
    """A registry whose process dies before its write number `dies_in`, counted from 0."""

    dies_in = -1

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("set_"):
            if self.dies_in == 0:
                raise Killed
            self.dies_in -= 1
        return super().__getattribute__(name)


@pytest.fixture
def registry(tmp_path: Path) -> Dying:
    return Dying(tmp_path)


@pytest.fixture
def three(registry: Dying, tmp_path: Path) -> list[Candidate]:
    return [registry.add(judged_candidate(tmp_path, policy, metrics={})) for policy in ("int8", "fp8", "bf16")]


def put_forward(registry: MemoryRegistry, *candidates: Candidate) -> None:
    for candidate in candidates:
        engines_of(registry, registry.candidates).promote([candidate], "tiny", candidate.name)


def killed(registry: Dying, act: Callable[[], object]) -> Iterator[dict[str, str]]:
    """Kill `act` before every write in turn, always starting from the same state; yield the aliases."""
    begin = deepcopy((registry.aliases, registry.versions))
    for writes in range(100):
        registry.aliases, registry.versions = deepcopy(begin)
        registry.dies_in = writes
        try:
            act()
        except Killed:
            registry.dies_in = -1
            yield dict(registry.aliases)
        else:
            assert writes > 1, "it writes"
            return
    raise AssertionError("it never ended")


@pytest.mark.parametrize("rolled_back", [False, True])
def test_a_killed_promotion_leaves_a_champion_and_is_finished_by_running_it_again(
    registry: Dying, three: list[Candidate], rolled_back: bool
) -> None:
    put_forward(registry, *three[:2])
    old, new = ("2", "3")
    if rolled_back:
        engines_of(registry, three).rollback()
        old, new = ("1", "2")
    for left in killed(registry, lambda: put_forward(registry, three[int(new) - 1])):
        assert left["champion"] == old, "the champion moves last"
        put_forward(registry, three[int(new) - 1])
        assert registry.aliases == {"champion": new, "previous": old}
        assert registry.versions[new]["promoted_over"] == old
        assert registry.versions[new].keys() >= {"promoted_by", "promoted_at"}
        assert "rolled_back_at" not in registry.versions[new]


def test_a_killed_rollback_leaves_a_champion_and_never_brings_the_bad_one_back(registry: Dying, three: list[Candidate]) -> None:
    put_forward(registry, *three[:2])
    for left in killed(registry, lambda: engines_of(registry, three).rollback()):
        if left["champion"] == "2":
            engines_of(registry, three).rollback()
        else:
            with pytest.raises(UserError, match="no previous champion to return to"):
                engines_of(registry, three).rollback()
        assert registry.aliases["champion"] == "1"
        assert "rolled_back_at" in registry.versions["2"]
        assert "promoted_at" not in registry.versions["2"]


@pytest.mark.usefixtures("three")
def test_a_killed_route_leaves_a_way_back_and_is_finished_by_running_it_again(registry: Dying) -> None:
    def route(version: str) -> None:
        before = route_of(registry.read(), "copy")
        make_moves(registry, [Move("copy", before, before.moved_to(version), "a test")])

    route("1")
    for left in killed(registry, lambda: route("3")):
        assert left["route-copy"] in ("1", "3")
        assert left["route-copy"] == "1" or left["route-copy-previous"] == "1"
        route("3")
        assert route_of(registry.read(), "copy") == Route("3", "1")


def test_a_move_says_who_made_it_and_never_a_password(monkeypatch: pytest.MonkeyPatch) -> None:
    github = {"GITHUB_SERVER_URL": "https://github.com", "GITHUB_REPOSITORY": "a/b", "GITHUB_RUN_ID": "7"}
    assert mover(github) == "https://github.com/a/b/actions/runs/7"
    assert mover({"CI_JOB_URL": "https://u:secret@ci/job/1"}) == "https://***@ci/job/1"
    monkeypatch.setattr(promotion, "getuser", lambda: "ana")
    assert mover({}) == f"ana@{socket.gethostname()}"

    def nameless() -> str:
        raise KeyError("getpwuid(): uid not found")

    monkeypatch.setattr(promotion, "getuser", nameless)
    assert mover({}) == f"uid {os.getuid()}@{socket.gethostname()}"
