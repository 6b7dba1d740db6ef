"""A store of what would be: what is there is found, what is not is stood in for, and nothing is written.

The key of an artifact holds the digests of what it is made from, which are not known before that is made. A stand-in's digests
are words in their place: the same words wherever the same recipe is met again, so that the second job of a sweep sees what the
first one would make.
"""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.artifacts.digest import json_digest, tree_files
from pipeline.artifacts.store import Artifact, Recipe, Store
from pipeline.dry.past import Past

UNKNOWN = "unknown "
"""Begins what stands for a digest that may come out as one that is in the store."""
NEW = "new "
"""Begins what stands for one that cannot: of an artifact that holds timings, and of all that is made from it."""


@dataclass(frozen=True)
class ToBeMade(Artifact):
    """What stands in for an artifact that is not in the store."""

    stand_in: Callable[[str], str]
    """Returns what stands for the digest of a folder or a file of it."""

    def digest_under(self, folder: str) -> str:
        return self.stand_in(folder)


class _Files(dict[str, str]):
    """The files of an artifact that is not there: each has a digest that nobody knows yet."""

    def __init__(self, stand_in: Callable[[str], str]) -> None:
        super().__init__()
        self._stand_in = stand_in

    def __missing__(self, name: str) -> str:
        return self._stand_in(name)


@dataclass(frozen=True)
class Outcome:
    """What a command does about one artifact."""

    recipe: Recipe
    artifact: Artifact
    job: int
    """The first one that asks for it."""
    perhaps: bool = False
    """Whether it may be there already: where what it is made from is made again, and comes out as it was."""
    begun: bool = False
    """Whether an interrupted run left a part of it."""

    @property
    def reused(self) -> bool:
        return not isinstance(self.artifact, ToBeMade)


class ForeseenStore(Store):
    """A store from which nothing is made: `get` says what it would return."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.job = 1
        """Number of the job that asks."""
        self.outcomes: dict[str, Outcome] = {}
        """By key, in the order in which they were asked for."""
        self.models: dict[Path, str] = {}
        """Digests of checkpoints: jobs of a sweep share theirs, and reading one may take minutes."""
        self.past = Past(self)
        self._bundles: dict[str, dict[str, Any]] = {}
        """What stands for a bundle's digest -> its parts."""

    def get(self, recipe: Recipe, fill: Callable[[Path], None], *, resumable: bool = False) -> Artifact:  # noqa: ARG002
        """Return the artifact of `recipe` where it is there and intact, else what stands in for it."""
        known = self.outcomes.get(recipe.key)
        if known is not None:
            return known.artifact
        foreseen = _stand_ins(recipe.parts)
        artifact = None if foreseen else self.verified(recipe)
        perhaps = artifact is None and bool(foreseen) and self._may_be_there(recipe)
        begun = artifact is None and not foreseen and resumable and self.begun(recipe).is_dir()
        if artifact is None:
            artifact = self._to_be_made(recipe, timed=recipe.measures_time and not perhaps)
        self.outcomes[recipe.key] = Outcome(recipe, artifact, self.job, perhaps, begun)
        return artifact

    def _to_be_made(self, recipe: Recipe, timed: bool) -> ToBeMade:
        """Return what stands in for an artifact; `timed` says whether it will hold times, which never come out the same."""

        def stand_in(place: str) -> str:
            return self._stand_in(recipe, place, timed)

        files = _Files(stand_in)
        return ToBeMade(
            self.path(recipe), recipe.stage, recipe.key, stand_in(""), files, recipe.parts, False, 0.0, stand_in=stand_in
        )

    def _stand_in(self, recipe: Recipe, place: str, timed: bool) -> str:
        """Return what stands for the digest of a folder or a file: its own, where another artifact has the same one."""
        without = recipe.independent.get(place, ())
        parts = _stored(recipe.parts, without)
        if without:
            for one in self.past.of(recipe.stage):
                if _stored(one.parts, without) == parts and tree_files(one.directory) == one.files:
                    return one.digest_of(place)
        new = timed or any(word.startswith(NEW) for word in _stand_ins(parts))
        word = f"{NEW if new else UNKNOWN}{json_digest([parts, place])}"
        if recipe.stage == "build" and not place:
            self._bundles[word] = parts
        return word

    def _may_be_there(self, recipe: Recipe) -> bool:
        """Whether there is an artifact, or an earlier job makes one, that differs in nothing but digests nobody knows yet."""
        others = [one.parts for one in self.past.of(recipe.stage)]
        others += [_stored(one.recipe.parts) for one in self.outcomes.values() if one.recipe.stage == recipe.stage]
        ours = _stored(recipe.parts)
        return any(self._may_be_same(ours, other) for other in others)

    def _may_be_same(self, ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
        bare: dict[str, Any] = {"config": None, "inputs": None}
        if {**ours, **bare} != {**theirs, **bare} or ours["config"].keys() != theirs["config"].keys():
            return False
        if not theirs["inputs"].keys() <= ours["inputs"].keys():  # an evaluation may have taken fewer rounds
            return False
        return all(
            self._may_be_equal(ours[section][name], value) for section in bare for name, value in theirs[section].items()
        )

    def _may_be_equal(self, digest: Any, other: Any) -> bool:
        """Whether two digests, of which words stand for those that nobody knows yet, may be one."""
        if digest == other:
            return True
        if not (isinstance(digest, str) and isinstance(other, str)) or digest.startswith(NEW) or other.startswith(NEW):
            return False
        if not (digest.startswith(UNKNOWN) or other.startswith(UNKNOWN)):
            return False
        one, another = self._bundle(digest), self._bundle(other)
        return one is None or another is None or self._may_be_same(one, another)

    def _bundle(self, digest: str) -> dict[str, Any] | None:
        """Return the parts of the bundle that a digest is of: its bill of materials names its key, no other has its bytes."""
        bundles = (one for one in self.past.providers(digest) if one.parts["stage"] == "build")
        found = (one.parts for one in bundles if one.digest_of("") == digest)
        return self._bundles.get(digest) or next(found, None)


def is_known(artifact: Artifact) -> bool:
    """Return whether an artifact is there."""
    return not isinstance(artifact, ToBeMade)


def _stored(parts: Mapping[str, Any], without: Collection[str] = ()) -> dict[str, Any]:
    """Return parts as a manifest holds them, without some names of the configuration and the inputs."""
    stored: dict[str, Any] = json.loads(json.dumps(parts))
    for section in ("config", "inputs"):
        stored[section] = {name: value for name, value in stored[section].items() if name not in without}
    return stored


def _stand_ins(parts: Mapping[str, Any]) -> list[str]:
    """Return what of an artifact's parts stands for digests that nobody knows yet."""
    values = [*parts["inputs"].values(), *parts["config"].values()]
    return [value for value in values if isinstance(value, str) and value.startswith((UNKNOWN, NEW))]
