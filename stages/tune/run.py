"""`stage=tune`: what each place costs, the policies of fewest bytes within budgets, and what all their formats cost at once.

The sum of what places cost alone predicts what they cost together, but for their interactions. So every policy that the integer
program proposes is measured as it is, and the program is asked again with the budget that the measurement suggests. HiGHS,
which SciPy carries, solves the program.
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

from pipeline.core.formats import Format
from pipeline.core.kv import FP16_POLICY, KVPolicy, KVShape
from pipeline.core.records import Progress
from pipeline.core.scales import KVScales
from pipeline.planning.tuning import (
    SIDES,
    TUNE_FILE,
    MeasuredPolicy,
    Place,
    TuneConfig,
    TuneReport,
    UnitSensitivity,
    beaten,
    choose,
    is_on_front,
    mixed_policy,
    mixed_scales,
)
from pipeline.statistics.bootstrap import resampled_sums
from pipeline.verdict.record import finite
from stages.checkpoints import load_causal_lm
from stages.engines.oracle.model import shape_for
from stages.tune.measure import Bench, TextSet, parts

ATTEMPTS = 4
"""Proposals that are measured for one budget."""

MARGINS = (0.9, 0.5)
"""What share of a uniform policy's KL a policy that is to beat it may have where it is checked: elsewhere it may have more."""

Unit = tuple[Place, ...]
"""What gets a format of its own: a layer's keys, its values, or both."""


@dataclass(frozen=True)
class Option:
    """What one unit costs in one format."""

    bytes: int
    """Bytes of one token."""
    kl: float
    """Mean KL of this unit alone, in nats per token; infinite or NaN where it cannot be taken."""


def fewest_bytes(units: Sequence[Sequence[Option]], budget: float) -> tuple[int, ...] | None:
    """Return the number of every unit's option, so that the bytes are fewest and the sum of KL stays within `budget`; None
    where no choice does."""
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


@dataclass
class Tuner:
    """The search on one model."""

    bench: Bench
    shape: KVShape
    uniform: Sequence[KVPolicy]
    """In the order of the configuration."""
    config: TuneConfig
    search: TextSet
    """Texts on which each place is measured alone."""
    check: TextSet
    """Texts on which proposals are measured."""
    held_out: TextSet
    """Texts on which what is found is measured."""
    progress: Progress
    alone: dict[tuple[Unit, int], float] = field(default_factory=dict)
    """Mean KL of a unit in the formats of a uniform policy, by its number, everything else at 16 bits."""

    @cached_property
    def units(self) -> list[Unit]:
        """What gets a format of its own: each layer's keys and values apart, or each layer as a whole."""
        layers = range(self.shape.layers)
        if self.config.unit == "layer":
            return [tuple((layer, side) for side in SIDES) for layer in layers]
        return [((layer, side),) for layer in layers for side in SIDES]

    def measure_units(self) -> None:
        """Measure every unit alone in the formats of every uniform policy; formats that policies share are measured once."""
        cells = [(unit, number) for unit in self.units for number in range(len(self.uniform))]
        for done, (unit, number) in enumerate(cells):
            self.progress("sensitivity [cells]", done, len(cells))
            formats = dict(zip(unit, _formats(self.uniform[number], unit), strict=True))
            if all(form.exact for form in formats.values()):
                self.alone[unit, number] = 0.0
            else:
                kl = self.bench.kl(self._policy(formats), self.search, above=unit[0][0])
                self.alone[unit, number] = float(kl.mean())
        self.progress("sensitivity [cells]", len(cells), len(cells))

    def propose(self, target: float) -> KVPolicy | None:
        """Return the policy of fewest bytes whose KL is within `target` on the texts for checks; None without one."""
        budget, best, seen = target, None, set()
        for _ in range(ATTEMPTS):
            chosen = fewest_bytes(self._options(), budget)
            if chosen is None or chosen in seen:
                break
            seen.add(chosen)
            policy = self._mixed(chosen)
            joint, total = self._kl(policy, self.check), self._sum_of(policy)
            if joint <= target and (best is None or self._bytes(policy) < self._bytes(best)):
                best = policy
            if not (np.isfinite(joint) and joint > 0 and total > 0):
                budget /= 2
                continue
            # What the sum may be so that the joint KL is the target, if both keep their ratio.
            budget = total * target / joint
        return best

    def targets(self) -> list[float]:
        """Return the budgets: the configured one, what beats each uniform policy, and points between these; ascending."""
        uniform = sorted(kl for kl in (self._kl(policy, self.check) for policy in self.uniform) if np.isfinite(kl) and kl > 0)
        if not uniform:
            return [self.config.max_kl]
        between = np.geomspace(uniform[0], uniform[-1], self.config.points + 2)[1:-1]
        return sorted({self.config.max_kl, *(share * kl for share in MARGINS for kl in uniform), *between.tolist()})

    def measured(self, policy: KVPolicy, origin: Literal["uniform", "tuned"]) -> MeasuredPolicy:
        """Measure a policy on the texts for checks and on those held out."""
        checked, held_out = self.bench.kl(policy, self.check), self.bench.kl(policy, self.held_out)
        sums = resampled_sums(np.stack([held_out, np.ones_like(held_out)], axis=1), self.held_out.documents)
        return MeasuredPolicy(
            policy=policy,
            origin=origin,
            bytes_per_token=self._bytes(policy),
            kl_sum=finite(self._sum_of(policy)),
            kl_check=finite(float(checked.mean())),
            kl_held_out=finite(float(held_out.mean())),
            kl_held_out_upper=finite(float(np.percentile(sums[:, 0] / sums[:, 1], 95))),
        )

    def sensitivities(self) -> list[UnitSensitivity]:
        """Return what was measured of each unit."""
        return [
            UnitSensitivity(
                layer=unit[0][0],
                side=unit[0][1] if len(unit) == 1 else None,
                kl={policy.name: finite(self.alone[unit, number]) for number, policy in enumerate(self.uniform)},
            )
            for unit in self.units
        ]

    def _options(self) -> list[list[Option]]:
        return [
            [Option(self._unit_bytes(unit, policy), self.alone[unit, number]) for number, policy in enumerate(self.uniform)]
            for unit in self.units
        ]

    def _unit_bytes(self, unit: Unit, policy: KVPolicy) -> int:
        return self.shape.kv_heads * sum(form.token_bytes(self.shape.head_dim) for form in _formats(policy, unit))

    def _sum_of(self, policy: KVPolicy) -> float:
        """The sum of what a policy's units cost alone."""

        def number(unit: Unit) -> int:
            return next(n for n, other in enumerate(self.uniform) if _formats(other, unit) == _formats(policy, unit))

        return sum(self.alone[unit, number(unit)] for unit in self.units)

    def _mixed(self, chosen: Sequence[int]) -> KVPolicy:
        units = zip(self.units, chosen, strict=True)
        return self._policy({p: f for unit, n in units for p, f in zip(unit, _formats(self.uniform[n], unit), strict=True)})

    def _policy(self, formats: Mapping[Place, Format]) -> KVPolicy:
        exact = {(layer, side): FP16_POLICY.key for layer in range(self.shape.layers) for side in SIDES}
        unnamed = mixed_policy("tuned", exact | dict(formats), self.shape.layers)
        return unnamed.model_copy(update={"name": f"tuned_{self._bytes(unnamed)}"})

    def _bytes(self, policy: KVPolicy) -> int:
        return policy.bytes_per_token(self.shape)

    def _kl(self, policy: KVPolicy, texts: TextSet) -> float:
        return float(self.bench.kl(policy, texts).mean())


def _formats(policy: KVPolicy, unit: Unit) -> list[Format]:
    return [policy.sides(layer)[side] for layer, side in unit]


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
    """Search the policies of fewest bytes within budgets of KL and write the record, `tune.json`."""
    torch.set_num_threads(threads)
    model: Any = load_causal_lm(checkpoint, dtype=torch.float32).eval()
    search, check, held_out = parts(checkpoint, config, jsonl, seed)
    shape = shape_for(model, FP16_POLICY)
    bench = Bench(model, lambda policy: mixed_scales(policy, shape, uniform), out)
    tuner = Tuner(bench, shape, [policy for policy, _ in uniform], config, search, check, held_out, progress)
    tuner.measure_units()
    proposed: dict[str, KVPolicy] = {}
    targets = tuner.targets()
    for done, target in enumerate(targets):  # ascending: of two with the same bytes, and so name, the first has less KL
        progress("search [budgets]", done, len(targets))
        policy = tuner.propose(target)
        if policy is not None:
            proposed.setdefault(policy.name, policy)
    listed: list[tuple[KVPolicy, Literal["uniform", "tuned"]]] = [(policy, "uniform") for policy, _ in uniform]
    listed += [(policy, "tuned") for policy in proposed.values() if _is_new(policy, [p for p, _ in listed])]
    measured = []
    for done, (policy, origin) in enumerate(listed):
        progress("held out [policies]", done, len(listed))
        measured.append(tuner.measured(policy, origin))
    measured = [
        one.model_copy(update={"beats": beaten(one, measured), "on_front": is_on_front(one, measured)}) for one in measured
    ]
    chosen = choose(measured, config.max_kl, FP16_POLICY.bytes_per_token(shape))
    report = TuneReport(
        policies=[policy.name for policy, _ in uniform],
        unit=config.unit,
        max_kl=config.max_kl,
        tokens={part.name: part.scored for part in (search, check, held_out)},
        sensitivities=tuner.sensitivities(),
        measured=measured,
        chosen=chosen.policy.name if chosen is not None else None,
    )
    (out / TUNE_FILE).write_text(report.model_dump_json(indent=1) + "\n", encoding="utf-8")
    bench.close()


def _is_new(policy: KVPolicy, others: Sequence[KVPolicy]) -> bool:
    formats = policy.model_dump(exclude={"name"})
    return all(other.model_dump(exclude={"name"}) != formats for other in others)
