"""Locates the first deviation of an engine from its reference engine: position, step, layer and head."""

import math
from typing import Literal

import numpy as np

from stages.evaluate.conformance.request import Compared, Request
from stages.policies.policy import PAGE_TOKENS
from stages.verdict.conformance import (
    LEAST_KL,
    MEAN_STEP,
    STORED_ALLOWED,
    ComparedRequest,
    Deviation,
    allowed_in_layer,
)

NOTICED = 8.0
"""Distance in roundings above which a token's logits count as wrong in a deviating request. Sound engines stay below."""


def first_deviation(request: Request, compared: Compared, limit: float) -> Deviation:
    """Locate the first position at which a request deviates, and the faulty operation.

    The replay uses the engine's own cache, so errors do not spread between tokens. Wrong codes show at their own position and
    change no logits. A wrong read changes the logits of its own step, and the vectors that higher layers store for its token.
    """
    rows = [request.positions[row] for row in _wrong_rows(compared, limit)]
    least_errors = _least_errors(compared)
    wrong = [
        (copy.first + token, layer, side, head)
        for layer, copies in enumerate(compared.errors)
        for side, copy in copies.items()
        for head, token in (copy.engine > least_errors[layer]).nonzero().tolist()
    ]
    position = min(rows[:1] + [where[0] for where in wrong], default=request.positions[0])
    here = sorted(where[1:] for where in wrong if where[0] == position)
    act: Literal["stored", "read", "computed"] = "stored"
    layer, side, head = here[0] if here else (None, None, None)
    if not here or position in rows:
        shown, top = any(compared.errors), len(compared.errors) - 1
        act, side, head = "read" if shown else "computed", None, None
        layer = None if not shown else max(0, layer - 1) if layer is not None else top
    place = dict(zip(request.positions, request.places, strict=True)).get(position)
    return Deviation(
        sample=request.name,
        position=position,
        page_offset=position % PAGE_TOKENS,
        batch_row=None if place is None else place[0],
        batch_size=None if place is None else place[1],
        act=act,
        layer=layer,
        side=side,
        head=head,
    )


def _least_errors(compared: Compared) -> list[float]:
    """Return the error by layer above which a stored vector counts as wrong."""
    record, general = compared.record, _least_error(compared.record)
    allowed = [allowed_in_layer(rounding) for rounding in record.rounding.stored_by_layer]
    wrong = [times > 1 for times in record.layers_times_allowed]
    if not any(wrong):
        return [general] * len(compared.errors)
    return [limit if over else math.inf for limit, over in zip(allowed, wrong, strict=True)]


def _least_error(record: ComparedRequest) -> float:
    """Return the error above which a stored vector counts as wrong: the limit of single vectors, or of the mean if only the
    mean exceeds its limit."""
    worst = STORED_ALLOWED * (record.rounding.stored_error or 0.0) + record.scale_step
    if record.engine.stored_error is None or record.engine.stored_error > worst:
        return worst
    mean = STORED_ALLOWED * (record.rounding.stored_mean or 0.0) + MEAN_STEP
    return mean if record.engine.stored_mean is None or record.engine.stored_mean > mean else worst


def _wrong_rows(compared: Compared, limit: float) -> list[int]:
    """Return the rows of a request with wrong logits, or the worst row if only the request as a whole deviates."""
    unit = (compared.record.rounding.kl_max or 0.0) + LEAST_KL
    noticed: list[int] = np.flatnonzero(compared.kl > NOTICED**2 * unit).tolist()
    return noticed or ([int(compared.kl.argmax())] if compared.record.roundings > limit else [])
