"""kvgate from Python: `evaluate` a model under a policy, `load` an engine, fetch the `champion` (docs/start.md#from-python)."""

from pipeline.api.champions import champion
from pipeline.api.engines import LoadedEngine, load
from pipeline.api.evaluations import Evaluation, evaluate
from pipeline.core.errors import GateRefusal, MissingRequirement, UserError
from pipeline.core.kv import KVPolicy

__all__ = [
    "Evaluation",
    "GateRefusal",
    "KVPolicy",
    "LoadedEngine",
    "MissingRequirement",
    "UserError",
    "champion",
    "evaluate",
    "load",
]
