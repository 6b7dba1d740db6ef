"""What making an artifact takes, from what earlier ones of its kind took in this work directory; never from anything else."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from pipeline.artifacts.digest import json_digest
from pipeline.artifacts.store import Recipe
from pipeline.dry.past import Made, Past

MEASURED = ("baseline", "round")
"""Stages whose time is that of their samples."""
ROOTS = ("calibration", "quantize", "exports", "checkpoint", "server")
"""Stages whose inputs name the model itself."""
ANSWERS = "answers.jsonl"
"""Of a measured round: a line for each sample with an answer."""
NOT_SETTINGS = ("kv", "round", "python")
"""What of a configuration is told apart by itself, or costs nothing."""


@dataclass(frozen=True)
class Subject:
    """What an artifact that is to be made is about."""

    model: str
    """The checkpoint's digest."""
    weight_bytes: int
    policy: Mapping[str, Any] | None
    """None for what is of no policy."""
    answers: int | None
    """Samples with an answer; None for what asks none."""


@dataclass(frozen=True)
class Cost:
    """What making an artifact is expected to take; None where nothing tells."""

    seconds: float | None
    written: int | None
    """Bytes on disk, besides those that it shares with artifacts that are there."""
    whole: int | None
    """Bytes of all its files."""
    peak: int | None
    """Most resident memory of the process at once, in bytes."""
    basis: str
    """What that is taken from, in words; empty where nothing tells."""


WEIGHTS = ("checkpoint", "quantize", "export")
"""Stages that write a model's weights, once a model. A file system that shares blocks takes less for a copy."""


@dataclass(frozen=True)
class _Like:
    """An earlier artifact, and how it differs from the one that is to be made."""

    made: Made
    model: bool
    settings: bool
    policy: bool
    factor: float
    """By which its cost is multiplied; 0 where no factor is known."""

    @property
    def distance(self) -> tuple[bool, bool, bool]:
        return self.model, self.settings, self.policy


class Costs:
    """Costs by what a store's artifacts took."""

    def __init__(self, past: Past) -> None:
        self._past = past
        self.known: dict[str, Cost] = {}
        """By key."""
        self._planned: set[tuple[str, str]] = set()
        """Stage and model of what this command makes."""

    def of(self, recipe: Recipe, subject: Subject) -> Cost:
        """Return what making an artifact is expected to take, and note that it is made.

        It is the median of those before it that are most like it: of the same backend and hardware, and if there are any, of
        the same model, then the same settings, then the same policy. Of another model it is scaled by the bytes of the
        weights, of other samples by their number. Peak memory is the largest of those, and nothing where they are of another
        model: how much of it the weights took is not known.
        """
        first = self._is_first(recipe.stage, subject.model)
        self._planned.add((recipe.stage, subject.model))
        self.known[recipe.key] = self._expected(recipe, subject, first)
        return self.known[recipe.key]

    def _expected(self, recipe: Recipe, subject: Subject, first: bool) -> Cost:
        wanted = json.loads(json.dumps(recipe.parts))  # as a manifest holds it
        likes = [like for made in self._past.of(recipe.stage) if (like := self._like(made, wanted, subject)) is not None]
        least = min((like.distance for like in likes), default=None)
        nearest = [like for like in likes if like.distance == least]
        usable = [like for like in nearest if like.factor]
        peak = max((like.made.peak for like in nearest if like.made.peak is not None and not like.model), default=None)
        if not usable:
            weights = subject.weight_bytes if first and recipe.stage in WEIGHTS else None
            return Cost(None, weights, weights, peak, "the weights' bytes" if weights else "")
        alike = [like for like in usable if self._was_first(like.made) == first]
        if alike:
            written = median(like.factor * self._written(like.made) for like in alike)
        else:  # the first of a model also writes what later ones share with it
            written = median(like.factor * (_size(like.made) if first else self._written(like.made)) for like in usable)
        return Cost(
            median(like.factor * like.made.seconds for like in usable),
            round(written),
            round(median(like.factor * _size(like.made) for like in usable)),
            peak,
            _words(usable),
        )

    def _like(self, made: Made, wanted: dict[str, Any], subject: Subject) -> _Like | None:
        """Return how an earlier artifact differs; None for one of another backend, other hardware, or another kind of round."""
        parts = made.parts
        of, config = parts["config"], wanted["config"]
        if parts["hardware"] != wanted["hardware"] or parts["code"].keys() != wanted["code"].keys():
            return None
        if (of.get("round", 1) == 1) != (config.get("round", 1) == 1):  # the first one also measures times and probes
            return None
        model, policy = self._model(parts), self._policy(parts)
        other_model = model != subject.model
        settings = _settings(of) != _settings(config)
        factor = self._by_bytes(model, subject) if other_model else 1.0
        if wanted["stage"] in MEASURED:
            factor *= _by_answers(made, subject)
        elif wanted["stage"] == "tune" and settings:
            factor = 0.0
        other_policy = subject.policy is not None and policy != json_digest(subject.policy)
        return _Like(made, other_model, settings, other_policy, factor)

    def _by_bytes(self, model: str | None, subject: Subject) -> float:
        there = None if model is None else self._weights.get(model)
        return subject.weight_bytes / there if there else 0.0

    def _model(self, parts: dict[str, Any]) -> str | None:
        """Return the digest of the checkpoint that an artifact goes back to; None where the store does not tell."""
        inputs: dict[str, str] = parts["inputs"]
        if parts["stage"] in ROOTS:
            return inputs.get("checkpoint", inputs.get("gguf", inputs.get("tokenizer")))
        for name in ("checkpoint", "model", "baseline", "engine", "evaluation"):
            if name in inputs:
                makers = [one.parts for one in self._past.providers(inputs[name]) if one.parts["stage"] != parts["stage"]]
                return self._model(makers[0]) if makers else None
        return None

    def _policy(self, parts: dict[str, Any]) -> str | None:
        """Return the digest of the policy of an artifact; None where it has none, or the store does not tell."""
        if "kv" in parts["config"]:
            return json_digest(parts["config"]["kv"])
        engine = parts["inputs"].get("engine", parts["inputs"].get("baseline"))
        makers = [one.parts for one in self._past.providers(engine or "") if "kv" in one.parts["config"]]
        return json_digest(makers[0]["config"]["kv"]) if makers else None

    def _is_first(self, stage: str, model: str) -> bool:
        """Whether nothing of a stage is there for a model, or made before by this command."""
        known = any(self._model(made.parts) == model for made in self._past.of(stage))
        return not known and (stage, model) not in self._planned

    def _was_first(self, made: Made) -> bool:
        """Whether an artifact was the first of its stage and model."""
        model, stage = self._model(made.parts), made.parts["stage"]
        return next(one for one in self._past.of(stage) if self._model(one.parts) == model) is made

    def _written(self, made: Made) -> int:
        """Return the bytes on disk that came with an artifact: not those of files that an older one has as well."""
        files = (made.directory / name for name in made.files)
        return sum(path.stat().st_size for path in files if self._owners[path.stat().st_ino] is made)

    @cached_property
    def _owners(self) -> dict[int, Made]:
        """The oldest artifact with a file, by the file's inode."""
        owners: dict[int, Made] = {}
        for made in sorted((one for stage in self._past.stages.values() for one in stage), key=lambda one: one.at):
            for name in made.files:
                owners.setdefault((made.directory / name).stat().st_ino, made)
        return owners

    @cached_property
    def _weights(self) -> dict[str, int]:
        """Bytes of the weights of the models in the store, by the checkpoint's digest."""
        return {
            str(self._model(made.parts)): sum(
                (made.directory / name).stat().st_size for name in made.files if name.endswith(".safetensors")
            )
            for made in self._past.of("quantize")
        }


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in NOT_SETTINGS}


def _size(made: Made) -> int:
    return sum((made.directory / name).stat().st_size for name in made.files)


def _by_answers(made: Made, subject: Subject) -> float:
    """Return how many samples there are for each one of an earlier round; 0 where that is not known."""
    path: Path = made.directory / ANSWERS
    there = path.read_bytes().count(b"\n") if path.is_file() else 0
    return subject.answers / there if subject.answers and there else 0.0


def _words(likes: Sequence[_Like]) -> str:
    nearest = likes[0]
    differs = (("model", nearest.model), ("settings", nearest.settings), ("policy", nearest.policy))
    other = [word for word, differs in differs if differs]
    scaled = ", scaled" if any(like.factor != 1 for like in likes) else ""
    return f"{len(likes)} of other {', '.join(other)}{scaled}" if other else f"{len(likes)} alike{scaled}"
