"""The heads of a large vocabulary in a third of the bytes: a head's most likely tokens as they are, the others in steps.

The others are kept by their ids, whose gaps are small, with log-probabilities in steps of STEP, and together weigh what they
weighed: their log-probabilities are shifted so that they, the tokens before them and the rest have a mass of 1. What is read
back is STEP ** 2 / 24 nats, 2.5e-6, or less beside what was kept (tests/unit/test_evaluate_scores.py).
"""

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

EXACT = 256
"""Tokens of a long head whose log-probabilities are kept as they are."""
STEP = 2.0**-7
"""Of the other log-probabilities, in nats."""
Arrays = Mapping[str, npt.NDArray[Any]]


def packed(arrays: Arrays, longest: int) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of a sample's heads (`scores.SampleHeads`) as they are stored.

    Args:
        arrays: The arrays by name.
        longest: Tokens up to which a head is stored as it is.
    """
    offsets, tokens, logp, full = (arrays[name] for name in ("offsets", "tokens", "logp", "full"))
    listed, gaps, steps = np.ones(len(tokens), bool), [], []
    for start, stop in _long(offsets, longest):
        rest = np.sort(tokens[start + EXACT : stop])
        order = np.argsort(tokens[start + EXACT : stop])
        gaps.append(np.diff(rest.astype(np.int64), prepend=0))
        steps.append(_steps(logp[start + EXACT : stop][order]))
        listed[start + EXACT : stop] = False
    return {
        **arrays,
        "tokens": tokens[listed],
        "logp": logp[listed],
        "others": _compressed(np.concatenate([*gaps, np.zeros(0)]), np.concatenate([*steps, np.zeros(0)])),
        "full": _compressed(_steps(full.reshape(-1))),
        "vocab_size": np.array([full.shape[1]]),
    }


def unpacked(stored: Arrays, longest: int) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays that `packed` was given, but for the rounding of what is kept in steps."""
    offsets, rest, checked = stored["offsets"], stored["rest"], stored["checked"]
    parts = _long(offsets, longest)
    gaps, steps = _decompressed(stored["others"], 2)
    tokens = np.empty(int(offsets[-1]), stored["tokens"].dtype)
    logp = np.empty(int(offsets[-1]), np.float32)
    listed, begin = np.ones(len(tokens), bool), 0
    for start, stop in parts:
        listed[start + EXACT : stop] = False
    tokens[listed], logp[listed] = stored["tokens"], stored["logp"]
    for start, stop in parts:
        end = begin + stop - start - EXACT
        tokens[start + EXACT : stop] = gaps[begin:end].cumsum()
        others = -STEP * steps[begin:end].astype(np.float64)
        known = float(np.exp(logp[start : start + EXACT].astype(np.float64)).sum())
        mass = 1.0 - known - float(rest[np.searchsorted(offsets, start)])
        logp[start + EXACT : stop] = others + np.log(mass / np.exp(others).sum())
        begin = end
    (whole,) = _decompressed(stored["full"], 1)
    full = (-STEP * whole.astype(np.float64)).astype(np.float32).reshape(len(checked), int(stored["vocab_size"][0]))
    for row, position in zip(full, checked, strict=True):
        part = slice(offsets[position], offsets[position + 1])
        row[tokens[part]] = logp[part]
    names = ("offsets", "rest", "reference", "checked")
    return {**{name: stored[name] for name in names}, "tokens": tokens, "logp": logp, "full": full}


def _long(offsets: npt.NDArray[np.int64], longest: int) -> list[tuple[int, int]]:
    """The places of the heads that are longer than `longest`."""
    places = zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)
    return [(start, stop) for start, stop in places if stop - start > longest]


def _steps(logp: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    return np.clip(np.rint(logp.astype(np.float64) / -STEP), 0, 2**32 - 1)


def _compressed(*columns: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Whole numbers as bytes: the lowest ones of all first, so that those that are mostly equal lie together."""
    planes = (column.astype("<u4").view(np.uint8).reshape(-1, 4).T.tobytes() for column in columns)
    # Gaps and steps have no repetitions to be searched for, but runs of equal bytes.
    compressor = zlib.compressobj(strategy=zlib.Z_RLE)
    return np.frombuffer(compressor.compress(b"".join(planes)) + compressor.flush(), np.uint8)


def _decompressed(data: npt.NDArray[np.uint8], columns: int) -> list[npt.NDArray[np.uint32]]:
    planes = np.frombuffer(zlib.decompress(data.tobytes()), np.uint8).reshape(columns, 4, -1)
    return [np.ascontiguousarray(plane.T).view("<u4").reshape(-1) for plane in planes]
