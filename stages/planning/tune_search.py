"""`stage=tune`: measures each place's KL alone, finds the smallest policies within KL budgets, and measures these policies.

A place is one layer's keys or values. The sum of the places' separate KL predicts a policy's KL except for interactions.
Therefore every policy that the integer program proposes is measured, and the program runs again with a budget corrected by the
measurement. SciPy's HiGHS solves the program.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import block_diag

from stages.checkpoints.loading import load_causal_lm
from stages.core.records import Progress, finite
from stages.engines.reference.model import shape_for
from stages.evaluate.distances.distance import Array
from stages.planning.tune_measure import CHECK, SEARCH, Bench, split_texts
from stages.planning.tune_records import (
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
from stages.policies.policy import FP16_POLICY, SIDES, KVPolicy, KVShape
from stages.policies.scales import KVScales

ATTEMPTS = 4
"""Maximum proposals that are measured per budget."""


def fewest_bytes(sizes: Array, kl: Array, budget: float) -> tuple[int, ...] | None:
    """Choose one format per place with the fewest total bytes and a sum of KL within `budget`.

    Args:
        sizes: Bytes per token, (places, formats).
        kl: Mean KL in nats per token if only this place has this format, (places, formats); infinity or NaN excludes it.
        budget: The largest sum of KL.

    Returns:
        The index of the format per place, or None if no choice stays within the budget.
    """
    allowed = kl <= budget  # false for NaN
    share = np.where(allowed, kl / budget, 0.0)
    one_each = block_diag([np.ones((1, kl.shape[1]))] * len(kl))
    solution = milp(
        # Bytes are whole numbers, and the whole KL budget costs half a byte, so KL decides only between equal sizes.
        (sizes + 0.5 * share).ravel(),
        integrality=np.ones(kl.size),
        bounds=Bounds(0, allowed.ravel().astype(float)),
        constraints=[LinearConstraint(one_each, 1, 1), LinearConstraint(share.reshape(1, -1), -np.inf, 1)],
        options={"mip_rel_gap": 0.0},
    )
    return None if solution.x is None else tuple(int(index) for index in solution.x.reshape(kl.shape).argmax(axis=1))


class Tuner:
    """The search for policies on one model."""

    def __init__(self, bench: Bench, shape: KVShape, uniform: Sequence[KVPolicy], progress: Progress) -> None:
        """Measure every place alone in the format of every uniform policy. A format that policies share is measured once."""
        self.bench, self.shape = bench, shape
        self.places: list[Place] = [(layer, side) for layer in range(shape.layers) for side in SIDES]
        self.formats = [[policy.sides(layer)[side] for policy in uniform] for layer, side in self.places]
        heads, dim = shape.kv_heads, shape.head_dim
        self.sizes = np.array([[heads * form.token_bytes(dim) for form in row] for row in self.formats])
        self.alone = np.zeros(self.sizes.shape)
        """Mean KL with this place in the policy's format and all other places at 16 bits, (places, policies)."""
        for done, (place, number) in enumerate(np.ndindex(self.alone.shape)):
            progress("sensitivity [cells]", done, self.alone.size)
            form = self.formats[place][number]
            if not form.exact:
                policy = self._policy({self.places[place]: form})
                self.alone[place, number] = bench.kl(policy, SEARCH, above=self.places[place][0]).mean()
        progress("sensitivity [cells]", self.alone.size, self.alone.size)

    def propose(self, target: float) -> KVPolicy | None:
        """Return the smallest proposed policy with a KL of at most `target` on the check texts, or None."""
        budget, within, proposed = target, list[KVPolicy](), set()
        for _ in range(ATTEMPTS):
            chosen = fewest_bytes(self.sizes, self.alone, budget)
            if chosen is None or chosen in proposed:
                break
            proposed.add(chosen)
            policy = self._policy({self.places[place]: self.formats[place][number] for place, number in enumerate(chosen)})
            joint, total = self.kl(policy), float(self.alone[range(len(chosen)), chosen].sum())
            if joint <= target:
                within.append(policy)
            if not (np.isfinite(joint) and joint > 0 and total > 0):
                budget /= 2
                continue
            # The next budget for the summed KL: if the ratio of joint KL to sum stays the same, the joint KL meets the target.
            budget = total * target / joint
        return min(within, key=lambda policy: policy.bytes_per_token(self.shape), default=None)

    def _policy(self, formats: Mapping[Place, Format]) -> KVPolicy:
        exact = dict.fromkeys(self.places, FP16_POLICY.key)
        unnamed = mixed_policy("tuned", exact | dict(formats), self.shape.layers)
        return unnamed.model_copy(update={"name": f"tuned_{unnamed.bytes_per_token(self.shape)}"})

    def kl(self, policy: KVPolicy) -> float:
        """Return the mean KL of a whole policy on the check texts."""
        return float(self.bench.kl(policy, CHECK).mean())


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
    texts, shape = split_texts(checkpoint, config, jsonl, seed), shape_for(model, FP16_POLICY)
    bench = Bench(model, texts, lambda policy: mixed_scales(policy, shape, uniform), out)
    policies = [policy for policy, _ in uniform]
    tuner = Tuner(bench, shape, policies, progress)
    # Budgets: the configured one, and the KL of every uniform policy. They ascend: if two proposals have the same bytes, and so
    # the same name, the first one has less KL and is kept.
    targets = sorted({config.max_kl, *(kl for kl in map(tuner.kl, policies) if np.isfinite(kl) and kl > 0)})
    proposed: dict[str, KVPolicy] = {}
    for done, target in enumerate(targets):
        progress("search [budgets]", done, len(targets))
        policy = tuner.propose(target)
        if policy is not None:
            proposed.setdefault(policy.name, policy)
    candidates: list[tuple[KVPolicy, Literal["uniform", "tuned"]]] = [(policy, "uniform") for policy in policies]
    formats = [policy.model_dump(exclude={"name"}) for policy in policies]
    candidates += [(policy, "tuned") for policy in proposed.values() if policy.model_dump(exclude={"name"}) not in formats]
    measured = [
        MeasuredPolicy(policy=policy, origin=origin, bytes_per_token=policy.bytes_per_token(shape), kl=finite(tuner.kl(policy)))
        for policy, origin in candidates
    ]
    chosen = choose(measured, config.max_kl, FP16_POLICY.bytes_per_token(shape))
    report = TuneReport(
        max_kl=config.max_kl,
        tokens={name: sum(len(text.tokens) - text.first for text in part) for name, part in texts.items()},
        sensitivities=[
            Sensitivity(layer=layer, side=side, kl={policy.name: finite(kl) for policy, kl in zip(policies, row, strict=True)})
            for (layer, side), row in zip(tuner.places, tuner.alone, strict=True)
        ],
        measured=measured,
        chosen=chosen.policy.name if chosen is not None else None,
    )
    (out / TUNE_FILE).write_text(report.model_dump_json(indent=1) + "\n", encoding="utf-8")
    bench.close()
