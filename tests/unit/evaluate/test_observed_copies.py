"""A sequence keeps the codes of tokens that the engine evicted later, if it observed them before."""

import numpy as np

from stages.core.records import StoredCopy
from stages.evaluate.conformance.sequence import ForcedSequence
from stages.policies.policy import Side

SINKS = 64


def held(tokens: int, kept_from: int) -> list[dict[Side, StoredCopy]]:
    """Return the copy of a cache with the sinks and the tokens from `kept_from` on. Codes are positions."""
    codes = np.arange(tokens, dtype=np.uint8).reshape(1, tokens, 1)
    codes[:, SINKS:kept_from] = 0
    evicted = ((SINKS, kept_from),) if kept_from > SINKS else ()
    return [{Side.KEY: StoredCopy(0, codes, None, None, None, None, evicted)}]


def observed(*caches: tuple[int, int]) -> StoredCopy:
    sequence = ForcedSequence("", [])
    for tokens, kept_from in caches:
        sequence.observe(held(tokens, kept_from))
    return sequence.layers[0][Side.KEY]


def known(copy: StoredCopy) -> list[int]:
    """Return the positions whose codes the copy has, without its evicted positions."""
    lost = {position for start, stop in copy.evicted for position in range(start, stop)}
    codes = copy.codes[0, :, 0].tolist()
    assert all(code == (0 if position in lost else position) for position, code in enumerate(codes))
    return sorted(set(range(len(codes))) - lost)


def test_tokens_that_were_observed_in_time_keep_their_codes() -> None:
    assert known(observed((100, 64), (130, 64), (200, 128))) == list(range(200))


def test_only_tokens_between_two_observations_are_lost() -> None:
    copy = observed((80, 64), (150, 128), (160, 128), (250, 192))
    assert copy.evicted == ((80, 128), (160, 192))
    assert known(copy) == [*range(80), *range(128, 160), *range(192, 250)]


def test_sinks_that_came_after_the_first_observation_are_known() -> None:
    copy = observed((63, 64), (200, 128))
    assert copy.evicted == ((64, 128),)
    assert known(copy) == [*range(64), *range(128, 200)]
