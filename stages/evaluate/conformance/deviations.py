"""Decides which sequences of the stress test deviate from the reference engine.

The rules of conformance apply, with one difference: a rounding has a minimum size that comes from the whole run, because a
short sequence of random tokens may show too small a rounding by chance.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from stages.core.records import or_infinite
from stages.evaluate.conformance.comparer import ComparedSequence, SequenceComparer
from stages.evaluate.conformance.sequence import ForcedSequence, count_equal_first
from stages.evaluate.distances.distance import Array
from stages.verdict.conformance import Distance

PASS_TOKENS = 4096
"""Maximum tokens per pass of the reference engine; a longer sequence gets its own pass."""

ONE_IN = 4
"""In the first scenario, the rounding is measured on every fourth sequence, unless logits are judged by medians."""

MANY_ROWS = 16
"""Minimum rows of a median KL, because 16-bit rounding alone may change single rows of random tokens 100 times more."""

WORST_SHARE = 1 / 8
"""Minimum KL of a rounding, as a fraction of the largest KL of a rounding in the run. Without this minimum, sound engines have
shown 65 times the KL of a rounding."""

UNUSUAL = 30.0
"""Maximum KL if no rounding is used, as a multiple of the run's median. It applies to the mean of a sequence, and to the median
of all sequences of one name."""
UNUSUAL_KL = 0.02
"""Median KL in nats that is always allowed if the engine's arithmetic differs by design."""
FLIPPED_KL = 0.15
"""Mean KL in nats of a single sequence that is always allowed if the cache is hidden. With heavy hitters, one flipped code may
change which tokens are evicted later: sound sequences of 200 to 450 tokens had means of 0.0215 and 0.055."""


class Deviations:
    def __init__(self, comparer: SequenceComparer) -> None:
        reference = comparer.reference
        self.comparer = comparer
        self.by_median = reference.measures_rounding or reference.assumed_rounding is None
        """Whether medians judge the logits, because one flipped code changes a sequence more than all roundings."""
        self.kl_means: list[float] = []
        """Mean KL of every sequence."""
        self.kl: dict[str, list[Array]] = defaultdict(list)
        """KL by row, by sequence name; only if logits are judged by medians."""
        self.roundings: dict[object, Distance] = {}
        """Distances caused by a rounding, by `ForcedSequence.key`."""
        self.worst = 0.0, 0.0
        """Largest mean and maximum KL caused by a rounding in any sequence."""
        self.suspects: list[tuple[ForcedSequence, ComparedSequence]] = []
        """Sequences above their limit. The final limit may be higher."""

    def compare(self, sequences: Sequence[ForcedSequence], done: Callable[[int], None] = lambda _: None) -> None:
        """Compare sequences, then drop their logits and codes. Equal sequences with equal codes share a replay.

        Measuring a rounding doubles the cost of a replay. It is measured for every ONE_IN-th sequence of the first call, for
        sequences beyond the limits of known roundings, and for all if medians judge the logits or a sequence is suspect. All
        others would also be within the limits of their own rounding. `done` gets the token count of each sequence.
        """
        by_codes = defaultdict[object, list[ForcedSequence]](list)
        for sequence in sequences:
            by_codes[sequence.key, sequence.digest()].append(sequence)
        alike = {group[0]: group for group in by_codes.values()}
        fresh = list({sequence.key: sequence for sequence in alike if sequence.key not in self.roundings}.values())
        first = fresh if self.by_median or self.suspects else [] if self.roundings else fresh[::ONE_IN]
        self._replay(first, alike, done, disturbed=True)
        unclear = self._replay([sequence for sequence in alike if sequence not in first], alike, done, disturbed=False)
        self._replay(unclear, alike, done, disturbed=True)

    def _replay(
        self,
        chosen: Sequence[ForcedSequence],
        alike: Mapping[ForcedSequence, Sequence[ForcedSequence]],
        done: Callable[[int], None],
        *,
        disturbed: bool,
    ) -> list[ForcedSequence]:
        """Compare `chosen` and `alike` sequences with replays; return the chosen ones whose rounding must still be measured."""
        unclear = []
        for group in group_passes(chosen):
            for first, (replay, problem) in zip(group, self.comparer.replay(group, disturbed=disturbed), strict=True):
                compared = [self.comparer.compare(sequence, replay, problem) for sequence in alike[first]]
                if disturbed:
                    own = self.roundings.setdefault(first.key, compared[0].record.rounding)
                    self.worst = max(self.worst[0], own.kl_mean or 0.0), max(self.worst[1], own.kl_max or 0.0)
                rounding = self.roundings.get(first.key)
                if rounding is not None:
                    compared = [
                        replace(item, record=item.record.model_copy(update={"rounding": rounding})) for item in compared
                    ]
                suspects = [self._times_allowed(item) > 1 for item in compared]
                if rounding is None and any(suspects):
                    unclear.append(first)
                    continue
                for sequence, item, suspect in zip(alike[first], compared, suspects, strict=True):
                    self.kl_means.append(or_infinite(item.record.engine.kl_mean))
                    if self.by_median:
                        self.kl[sequence.name].append(item.kl)
                    if suspect:
                        self.suspects.append((sequence, item))
                    sequence.logits, sequence.layers = [], []
                    done(len(sequence.tokens))
        return unclear

    def _times_allowed(self, compared: ComparedSequence, usual_kl: float = 0.0) -> float:
        """Return the worst figure of a sequence as a multiple of its allowed maximum.

        `usual_kl`: mean KL of the run's median sequence. It replaces a rounding if the engine does not show its cache.
        """
        record, own, limit = compared.record, compared.record.rounding, self.comparer.reference.limit
        if self.by_median and record.engine.kl_max is not None:  # logits are judged only by medians, see `messages`
            without_kl = record.engine.model_copy(update={"kl_mean": 0.0, "kl_max": 0.0})
            return record.model_copy(update={"engine": without_kl}).times_allowed(limit)
        if not (record.problem or self.by_median or any(compared.errors)):
            return or_infinite(record.engine.kl_mean) / max(FLIPPED_KL, UNUSUAL * usual_kl)
        # A few sequences are very sensitive to rounding, for example if their attention depends on a single number.
        mean, largest = (WORST_SHARE * worst for worst in self.worst)
        least = {"kl_mean": max(or_infinite(own.kl_mean), mean), "kl_max": max(or_infinite(own.kl_max), largest)}
        return record.model_copy(update={"rounding": own.model_copy(update=least)}).times_allowed(limit)

    def messages(self) -> Iterator[str]:
        """Yield messages about deviating sequences, worst first and only the worst sequence per name."""
        usual = float(np.median(self.kl_means or [0.0]))
        times = [(self._times_allowed(compared, usual), sequence, compared) for sequence, compared in self.suspects]
        ranked = sorted((suspect for suspect in times if suspect[0] > 1), key=lambda suspect: -suspect[0])
        for name, count in Counter(sequence.name for _, sequence, _ in ranked).items():
            worst, sequence, compared = next(suspect for suspect in ranked if suspect[1].name == name)
            kl_max, problem = compared.record.engine.kl_max, compared.record.problem
            off = "logits are not finite" if kl_max is None else f"KL up to {kl_max:.1e} from the reference engine"
            more = f"; and {count - 1} more such" if count > 1 else ""
            place = problem or self.comparer.first_deviation(sequence, compared).describe()
            yield f"{name}: {place}, {off}, {worst:.2g} times as far as allowed{more}"
        if self.kl and self.comparer.reference.assumed_rounding is None:
            usual_row = float(np.median(np.concatenate([rows for parts in self.kl.values() for rows in parts])))
            yield from far_medians(self.kl, max(UNUSUAL_KL, UNUSUAL * usual_row))
        elif self.kl:
            usual_rounding = float(np.median([rounding.kl_mean or 0.0 for rounding in self.roundings.values()]))
            yield from far_medians(self.kl, self.comparer.reference.limit**2 * usual_rounding)


def group_passes(sequences: Sequence[ForcedSequence]) -> list[list[ForcedSequence]]:
    """Group sequences into passes of at most PASS_TOKENS tokens. Equal first tokens of a pass are computed once."""
    groups: list[list[ForcedSequence]] = []
    total = 0
    for sequence in sequences:
        group = groups[-1] if groups else []
        equal = max((count_equal_first(sequence.tokens, other.tokens) for other in group), default=0)
        total += len(sequence.tokens) - equal
        if not groups or total > PASS_TOKENS:
            groups.append([])
            total = len(sequence.tokens)
        groups[-1].append(sequence)
    return groups


def far_medians(kl: Mapping[str, Sequence[Array]], allowed: float) -> Iterator[str]:
    """Yield a message for every sequence name whose median KL from the reference engine exceeds `allowed`.

    `kl`: "scenario: kind of sequence" -> KL by row in nats. Kinds with few rows are pooled per scenario.
    """
    pooled: dict[str, list[Array]] = defaultdict(list)
    for name, rows in kl.items():
        few = sum(map(len, rows)) < MANY_ROWS
        pooled[f"{name.partition(':')[0]}: kinds with few tokens" if few else name] += rows
    for name, rows in pooled.items():
        joined = np.concatenate(rows)
        if len(joined) >= MANY_ROWS and not np.median(joined) <= allowed:
            far = f"KL {np.median(joined):.1e} from the reference engine in the median of {len(joined)} tokens"
            yield f"{name}: {far} ({allowed:.1e} allowed)"
