"""kvgate from Python: `evaluate` a model, `load` an engine or the `champion` (docs/start.md#from-python)."""

from pipeline.api.engines import LoadedEngine, champion, load
from pipeline.api.evaluations import Evaluation, evaluate
from stages.core.errors import GateRefusal, MissingRequirement, UserError

__all__ = ["Evaluation", "GateRefusal", "LoadedEngine", "MissingRequirement", "UserError", "champion", "evaluate", "load"]
