"""The rows of a dry run's table: what a chain asked for, with what making it is expected to take."""

from collections.abc import Iterator
from typing import Any

from pipeline.artifacts.store import Recipe
from pipeline.config.config import JUDGING
from pipeline.core.kv import FP16_POLICY
from pipeline.dry.chain import ForeseenChain
from pipeline.dry.costs import Costs, Subject
from pipeline.registry.tracking import locate
from pipeline.run.inputs import inspect_model, weight_bytes
from pipeline.terminal.dry import Row

JUDGED = ("round", "evaluate", "identity")
"""Stages of whose recipes the engine alone says the policy."""


def rows_of(chain: ForeseenChain, costs: Costs, job: int) -> Iterator[Row]:
    """Yield a row for each artifact that a job asks for, in the order in which it does."""
    registers = False
    for stage in chain.finished:
        outcome = chain.store.outcomes[stage.artifact.key]
        certain = chain.is_certain(outcome.recipe)
        registers = registers or (outcome.recipe.stage == "identity" and not outcome.reused and _is_copied(chain))
        if outcome.reused or outcome.job != job:
            word = "reused" if outcome.reused else f"made by job {outcome.job}"
            yield Row(job, stage.title, word, False, certain)
            continue
        cost = costs.of(outcome.recipe, _subject(chain, outcome.recipe))
        word = "goes on" if outcome.begun else "made"
        yield Row(job, stage.title, word, True, certain, outcome.perhaps, cost.seconds, cost.written, cost.peak, cost.basis)
    if registers:
        written = _bundle_bytes(chain, costs)
        yield Row(job, "the engine in MLflow", "copied", True, True, written=written, basis="its bundle", timed=False)


def _subject(chain: ForeseenChain, recipe: Recipe) -> Subject:
    policy: Any = recipe.config.get("kv")
    if recipe.stage == "baseline":
        policy = FP16_POLICY.model_dump()
    elif recipe.stage in JUDGED:
        policy = chain.config.kv.model_dump()
    number = recipe.config.get("round")
    answers = chain.answers(number) if isinstance(number, int) else None
    return Subject(chain.subject, weight_bytes(inspect_model(chain.given)), policy, answers)


def _is_copied(chain: ForeseenChain) -> bool:
    """Whether the registry keeps a copy of the engine that is registered, on this machine."""
    config = chain.config
    if config.stage not in JUDGING or not config.tracking.enabled:
        return False
    location = locate(config.tracking, config.work, config.model.label)
    return location.log_bundle and not location.served


def _bundle_bytes(chain: ForeseenChain, costs: Costs) -> int | None:
    engine = chain.engine(chain.config.kv)
    if chain.store.outcomes[engine.key].reused:
        return sum((engine.path / name).stat().st_size for name in engine.files)
    return costs.known[engine.key].whole
