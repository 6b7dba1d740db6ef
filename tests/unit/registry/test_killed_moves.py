"""Promotions, rollbacks and routes that are killed before each of their writes in turn, and then repeated."""

import os
import socket
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from helpers.registry.candidates import MemoryRegistry

from pipeline.registry import run_content
from pipeline.registry.run_content import author
from stages.core.errors import UserError


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

    def put(self, version: str) -> None:
        candidate = self.candidates[version]
        self.engines().promote([candidate], "tiny", candidate.name)

    def killed(self, act: Callable[[], object]) -> Iterator[dict[str, str]]:
        """Kill `act` before every write in turn, each time from the same registry; yield the aliases left."""
        begin = deepcopy((self.aliases, self.versions, self.routes_left))
        for writes in range(100):
            self.aliases, self.versions, self.routes_left = deepcopy(begin)
            self.dies_in = writes
            try:
                act()
            except Killed:
                self.dies_in = -1
                yield dict(self.aliases)
            else:
                assert writes > 1, "the action makes several writes"
                return
        raise AssertionError("the action makes over 100 writes")


@pytest.fixture
def registry(tmp_path: Path) -> Dying:
    """A registry of three engines; the second is the champion, the first the previous one."""
    registry = Dying(tmp_path)
    for policy in ("int8", "fp8", "bf16"):
        registry.judge(policy)
    registry.put("1")
    registry.put("2")
    return registry


@pytest.mark.parametrize("rolled_back", [False, True])
def test_a_killed_promotion_can_be_repeated(registry: Dying, rolled_back: bool) -> None:
    old, new = ("2", "3")
    if rolled_back:
        registry.engines().rollback()
        old, new = ("1", "2")
    for left in registry.killed(lambda: registry.put(new)):
        assert left["champion"] == old, "the champion moves last"
        registry.put(new)
        assert registry.aliases == {"champion": new, "previous": old}
        assert registry.versions[new]["promoted_over"] == old
        assert registry.versions[new].keys() >= {"promoted_by", "promoted_at"}
        assert "rolled_back_at" not in registry.versions[new]


def test_a_killed_rollback_never_restores_the_bad_champion(registry: Dying) -> None:
    for left in registry.killed(lambda: registry.engines().rollback()):
        if left["champion"] == "2":
            registry.engines().rollback()
        else:
            with pytest.raises(UserError, match="champion cannot go back"):
                registry.engines().rollback()
        assert registry.aliases["champion"] == "1"
        assert "rolled_back_at" in registry.versions["2"]
        assert "promoted_at" not in registry.versions["2"]


def test_a_killed_route_can_be_repeated_and_rolled_back(registry: Dying) -> None:
    registry.routed(copy="1")
    for left in registry.killed(lambda: registry.routed(copy="3")):
        assert left["route-copy"] in ("1", "3")
        assert left["route-copy"] == "1" or left["route-copy-previous"] == "1"
        registry.routed(copy="3")
        assert (registry.aliases["route-copy"], registry.aliases["route-copy-previous"]) == ("3", "1")


def test_a_move_says_who_made_it_and_never_a_password(monkeypatch: pytest.MonkeyPatch) -> None:
    github = {"GITHUB_SERVER_URL": "https://github.com", "GITHUB_REPOSITORY": "a/b", "GITHUB_RUN_ID": "7"}
    assert author(github) == "https://github.com/a/b/actions/runs/7"
    assert author({"CI_JOB_URL": "https://u:secret@ci/job/1"}) == "https://***@ci/job/1"
    monkeypatch.setattr(run_content, "getuser", lambda: "ana")
    assert author({}) == f"ana@{socket.gethostname()}"

    def nameless() -> str:
        raise KeyError("getpwuid(): uid not found")

    monkeypatch.setattr(run_content, "getuser", nameless)
    assert author({}) == f"uid {os.getuid()}@{socket.gethostname()}"
