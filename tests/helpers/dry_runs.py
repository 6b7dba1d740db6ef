"""What a dry run foresees beside what the run then does."""

from dataclasses import dataclass
from typing import Any

import pytest

from pipeline.artifacts.store import Artifact
from pipeline.config.compose import Plan
from pipeline.dry.chain import ForeseenChain, open_foreseen
from pipeline.dry.store import NEW, UNKNOWN, ForeseenStore
from pipeline.run.chain import Chain
from pipeline.run.runner import run


@dataclass(frozen=True)
class Asked:
    """An artifact that a job asked for."""

    title: str
    key: str | None
    """None where it is not known before."""
    reused: bool
    certain: bool = True
    """Whether it is known that it is asked for, and whether it is there."""


Made = list[list[Asked]]
"""By job."""


def foreseen(jobs: Plan) -> Made:
    """Return what the jobs would ask for."""
    store, asked = ForeseenStore(jobs.jobs[0].work / "artifacts"), []
    for number, config in enumerate(jobs.jobs, start=1):
        store.job = number
        chain = open_foreseen(config, store)
        chain.foresee()
        asked.append([_asked(chain, stage.title, stage.artifact.key, number) for stage in chain.finished])
    return asked


def _asked(chain: ForeseenChain, title: str, key: str, job: int) -> Asked:
    one = chain.store.outcomes[key]
    values = [*one.recipe.inputs.values(), *map(str, one.recipe.config.values())]
    unknown = any(value.startswith((UNKNOWN, NEW)) for value in values)
    certain = chain.is_certain(one.recipe) and not one.perhaps
    return Asked(title, None if unknown else key, one.reused or one.job < job, certain)


def happened(jobs: Plan) -> Made:
    """Run the jobs of a sweep, and return what they asked for."""
    made = []
    for config in jobs.jobs:
        asked: list[Asked] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Chain, "_get", _noting(asked))
            run(config, "sweep", sweeping=jobs.sweeping)
        made.append(asked)
    return made


def _noting(asked: list[Asked]) -> Any:
    get = Chain._get

    def noted(self: Chain, recipe: Any, fill: Any, title: str, resumable: bool) -> Artifact:
        artifact = get(self, recipe, fill, title, resumable)
        asked.append(Asked(title, artifact.key, artifact.reused))
        return artifact

    return noted


def check(foretold: Made, made: Made) -> None:
    """What was foreseen happened: the same artifacts in the same order, reused or made, under the keys that were known."""
    assert len(foretold) == len(made)
    for before, after in zip(foretold, made, strict=True):
        found = {one.title: one for one in after}
        assert [one.title for one in before if one.title in found] == [one.title for one in after]
        assert [one.title for one in before if one.certain and one.title not in found] == []
        for one in before:
            if one.title in found and one.certain:
                assert one.reused == found[one.title].reused, one.title
            if one.title in found and one.key is not None:
                assert one.key == found[one.title].key, one.title


def made_titles(made: Made) -> list[list[str]]:
    """Return what each job made."""
    return [[one.title for one in job if not one.reused] for job in made]
