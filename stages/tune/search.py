"""The integer program: a format for every unit, so that the bytes are fewest and the summed KL stays within a budget.

A unit is what gets a format of its own: a layer's keys, its values, or both. Solved by HiGHS, which SciPy carries.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array


@dataclass(frozen=True)
class Option:
    """What one unit costs in one format."""

    bytes: int
    """Bytes of one token."""
    kl: float
    """Mean KL of this unit alone, in nats per token; infinite or NaN where it cannot be taken."""


def fewest_bytes(units: Sequence[Sequence[Option]], budget: float) -> tuple[int, ...] | None:
    """Return the number of every unit's option, None when no choice stays within the budget."""
    owner = np.array([number for number, options in enumerate(units) for _ in options])
    flat = [option for options in units for option in options]
    kl = np.array([option.kl / budget for option in flat])
    allowed = kl <= 1  # false for NaN
    kl = np.where(allowed, kl, 0.0)
    # Bytes are whole numbers, and the sum of KL within the budget is worth half a byte: it decides between equals alone.
    cost = np.array([option.bytes for option in flat]) + 0.5 * kl
    one_each = csr_array((np.ones(len(flat)), (owner, np.arange(len(flat)))), shape=(len(units), len(flat)))
    solution = milp(
        cost,
        integrality=np.ones(len(flat)),
        bounds=Bounds(0, allowed.astype(float)),
        constraints=[LinearConstraint(one_each, 1, 1), LinearConstraint(kl[None, :], -np.inf, 1)],
        options={"mip_rel_gap": 0.0},
    )
    if solution.x is None:
        return None
    taken = np.flatnonzero(solution.x > 0.5)
    first = np.searchsorted(owner, np.arange(len(units)))
    return tuple(int(index - first[owner[index]]) for index in taken)
