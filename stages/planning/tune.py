"""`stage=tune`: measures each place's KL alone, finds the smallest policies within KL budgets, and measures these policies.

A place is one layer's keys or values. The sum of the places' separate KL predicts a policy's KL except for interactions.
Therefore every policy that the integer program proposes is measured, and the program runs again with a budget corrected by the
measurement. SciPy's HiGHS solves the program.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from stages.checkpoints.loading import load_causal_lm
from stages.core.records import Progress
from stages.engines.reference.model import shape_for
from stages.planning.tune_measure import Bench, TextSet, parts
from stages.planning.tuning import (
    SIDES,
    TUNE_FILE,
    MeasuredPolicy,
    Place,
    Sensitivity,
    TuneConfig,
    TuneReport,
    choose,
    mixed_policy,
    mixed_scales,
)
from stages.policies.formats import Format
from stages.policies.policy import FP16_POLICY, KVPolicy, KVShape
from stages.policies.scales import KVScales
from stages.verdict.record import finite

ATTEMPTS = 4
"""Maximum proposals that are measured per budget."""


@dataclass(frozen=True)
class Option:
    """The cost of one place in one format."""

    bytes: int
    """Bytes per token."""
    kl: float
    """Mean KL with only this place quantized, in nats per token; infinite or NaN excludes the option."""


def fewest_bytes(places: Sequence[Sequence[Option]], budget: float) -> tuple[int, ...] | None:
    """Choose one option per place with the fewest total bytes and a sum of KL within `budget`.

    Return the index of the option per place, or None if no choice stays within the budget.
    """
    owner = np.array([number for number, options in enumerate(places) for _ in options])
    flat = [option for options in places for option in options]
    kl = np.array([option.kl / budget for option in flat])
    allowed = kl <= 1  # false for NaN
    kl = np.where(allowed, kl, 0.0)
    # Bytes are whole numbers, and the whole KL budget costs half a byte, so KL decides only between equal sizes.
    cost = np.array([option.bytes for option in flat]) + 0.5 * kl
    one_each = csr_array((np.ones(len(flat)), (owner, np.arange(len(flat)))), shape=(len(places), len(flat)))
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
    first = np.searchsorted(owner, np.arange(len(places)))
    return tuple(int(index - first[owner[index]]) for index in taken)


@dataclass
class Tuner:
    """The search for policies on one model."""

    bench: Bench
    shape: KVShape
    uniform: Sequence[KVPolicy]
    """Uniform policies in the order of the configuration."""
    config: TuneConfig
    search: TextSet
    """Texts for measuring each place alone."""
    check: TextSet
    """Texts for measuring whole policies."""
    progress: Progress
    alone: dict[tuple[Place, int], float] = field(default_factory=dict)
    """(place, index of a uniform policy) -> mean KL with this place in the policy's format and all other places at 16 bits."""

    @cached_property
    def places(self) -> list[Place]:
        """Keys and values of all layers."""
        return [(layer, side) for layer in range(self.shape.layers) for side in SIDES]

    def measure_places(self) -> None:
        """Measure every place alone in every uniform policy's format. A format that policies share is measured once."""
        cells = [(place, number) for place in self.places for number in range(len(self.uniform))]
        for done, (place, number) in enumerate(cells):
            self.progress("sensitivity [cells]", done, len(cells))
            form = _format(self.uniform[number], place)
            kl = 0.0 if form.exact else float(self.bench.kl(self._policy({place: form}), self.search, above=place[0]).mean())
            self.alone[place, number] = kl
        self.progress("sensitivity [cells]", len(cells), len(cells))

    def propose(self, target: float) -> KVPolicy | None:
        """Return the smallest proposed policy with a KL of at most `target` on the check texts, or None."""
        budget, within, seen = target, list[KVPolicy](), set()
        for _ in range(ATTEMPTS):
            chosen = fewest_bytes(self._options(), budget)
            if chosen is None or chosen in seen:
                break
            seen.add(chosen)
            policy = self._policy(
                {place: _format(self.uniform[n], place) for place, n in zip(self.places, chosen, strict=True)}
            )
            joint, total = self.kl(policy), sum(self.alone[cell] for cell in zip(self.places, chosen, strict=True))
            if joint <= target:
                within.append(policy)
            if not (np.isfinite(joint) and joint > 0 and total > 0):
                budget /= 2
                continue
            # The next budget for the summed KL: if the ratio of joint KL to sum stays the same, the joint KL meets the target.
            budget = total * target / joint
        return min(within, key=lambda policy: policy.bytes_per_token(self.shape), default=None)

    def targets(self) -> list[float]:
        """Return the KL budgets in ascending order: the configured budget, and the KL of every uniform policy."""
        return sorted({self.config.max_kl, *(kl for kl in map(self.kl, self.uniform) if np.isfinite(kl) and kl > 0)})

    def _options(self) -> list[list[Option]]:
        heads, dim = self.shape.kv_heads, self.shape.head_dim
        return [
            [
                Option(heads * _format(policy, place).token_bytes(dim), self.alone[place, n])
                for n, policy in enumerate(self.uniform)
            ]
            for place in self.places
        ]

    def _policy(self, formats: Mapping[Place, Format]) -> KVPolicy:
        exact = dict.fromkeys(self.places, FP16_POLICY.key)
        unnamed = mixed_policy("tuned", exact | dict(formats), self.shape.layers)
        return unnamed.model_copy(update={"name": f"tuned_{unnamed.bytes_per_token(self.shape)}"})

    def kl(self, policy: KVPolicy) -> float:
        """Return the mean KL of a whole policy on the check texts."""
        return float(self.bench.kl(policy, self.check).mean())


def _format(policy: KVPolicy, place: Place) -> Format:
    layer, side = place
    return policy.sides(layer)[side]


def tune(
    checkpoint: Path,
    out: Path,
    *,
    jsonl: Path | None,
    seed: int,
    uniform: Sequence[tuple[KVPolicy, KVScales]],
    config: TuneConfig,
    threads: int,
    progress: Progress,
) -> None:
    """Search for the smallest policies within KL budgets, and write the result to `tune.json`."""
    torch.set_num_threads(threads)
    model: Any = load_causal_lm(checkpoint, dtype=torch.float32).eval()
    search, check = parts(checkpoint, config, jsonl, seed)
    shape = shape_for(model, FP16_POLICY)
    bench = Bench(model, lambda policy: mixed_scales(policy, shape, uniform), out)
    tuner = Tuner(bench, shape, [policy for policy, _ in uniform], config, search, check, progress)
    tuner.measure_places()
    proposed: dict[str, KVPolicy] = {}
    targets = tuner.targets()
    # Targets ascend: if two proposals have the same bytes, and so the same name, the first one has less KL and is kept.
    for done, target in enumerate(targets):
        progress("search [budgets]", done, len(targets))
        policy = tuner.propose(target)
        if policy is not None:
            proposed.setdefault(policy.name, policy)
    listed: list[tuple[KVPolicy, Literal["uniform", "tuned"]]] = [(policy, "uniform") for policy, _ in uniform]
    known = [policy.model_dump(exclude={"name"}) for policy, _ in uniform]
    listed += [(policy, "tuned") for policy in proposed.values() if policy.model_dump(exclude={"name"}) not in known]
    measured = [
        MeasuredPolicy(policy=policy, origin=origin, bytes_per_token=policy.bytes_per_token(shape), kl=finite(tuner.kl(policy)))
        for policy, origin in listed
    ]
    names = [policy.name for policy, _ in uniform]
    chosen = choose(measured, config.max_kl, FP16_POLICY.bytes_per_token(shape))
    report = TuneReport(
        max_kl=config.max_kl,
        tokens={part.name: part.scored for part in (search, check)},
        sensitivities=[
            Sensitivity(layer=place[0], side=place[1], kl={name: finite(tuner.alone[place, n]) for n, name in enumerate(names)})
            for place in tuner.places
        ],
        measured=measured,
        chosen=chosen.policy.name if chosen is not None else None,
    )
    (out / TUNE_FILE).write_text(report.model_dump_json(indent=1) + "\n", encoding="utf-8")
    bench.close()
