"""The audit of an engine's scales, before anything of it is judged."""

from collections.abc import Collection

from pipeline.core.engine import Engine
from pipeline.core.errors import GateRefusal
from pipeline.verdict.delivery import ScaleChange, describe_changes, scale_changes
from pipeline.verdict.thresholds import ScaleChangeKind


def audit_scales(engine: Engine, allowed: Collection[ScaleChangeKind]) -> list[ScaleChange] | None:
    """Return the scales that an engine uses otherwise than its checkpoint carries them; None where it loads none by itself.

    Raises:
        GateRefusal: naming those that `gates.allow_scale_changes` does not accept.
    """
    if not engine.can(Engine.delivery):
        return None
    policy = engine.policy
    static = {
        layer: [side for side, form in policy.sides(layer).items() if form.has_static_scales]
        for layer in range(engine.shape.layers)
    }
    changes = scale_changes(engine.delivery(), static)
    refused = [change for change in changes if change.kind not in allowed]
    if refused:
        kinds = ",".join(sorted({change.kind for change in changes}))
        raise GateRefusal(
            f"kv={policy.name}: the engine does not use the scales of its checkpoint: {describe_changes(refused)}; deliver "
            f"them as it reads them, or judge it as it is with gates.allow_scale_changes=[{kinds}]"
        )
    return changes
