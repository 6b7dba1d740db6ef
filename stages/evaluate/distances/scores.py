"""The baseline's distributions as they are stored: the head of each.

A head lists the most likely tokens with their log-probabilities until the others together have less than REST_MASS, so that
its length follows the distribution: tens of tokens where the model is sure, thousands where it is not. At most vocab_size / 8
tokens are listed (LEAST_CAP in small vocabularies).

`logprobs.safetensors` holds the arrays of `SampleHeads` for each sample, named `<id>/<array>`. If a head is longer than
LEAST_CAP, the sample's arrays are packed into a third of the bytes: the EXACT most likely tokens of a head as they are, the
others by their ids, whose gaps are small, with log-probabilities in steps of STEP. Reading shifts the log-probabilities of the
others so that all tokens and the rest have a mass of 1. What is read is at most STEP ** 2 / 24 nats, 2.5e-6, from what was
written (tests/unit/test_evaluate_scores.py).
"""

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import safe_open
from safetensors.numpy import save_file

from stages.evaluate.distances.distance import LEAST_CAP, Distributions, Head, Tokens


@dataclass(frozen=True)
class SampleHeads:
    """The heads of a sample's N scored tokens, one after the other."""

    offsets: npt.NDArray[np.int64]
    """(N + 1): head n is tokens[offsets[n] : offsets[n + 1]]."""
    tokens: Tokens
    logp: npt.NDArray[np.float32]
    rest: npt.NDArray[np.float64]
    """(N)."""
    reference: npt.NDArray[np.float64]
    """(N)."""

    @classmethod
    def of(cls, heads: Sequence[Head]) -> "SampleHeads":
        """Join the heads of a sample's scored tokens."""
        return cls(
            offsets=np.cumsum([0, *(len(head.tokens) for head in heads)], dtype=np.int64),
            tokens=np.concatenate([head.tokens for head in heads]),
            logp=np.concatenate([head.logp for head in heads]),
            rest=np.array([head.rest for head in heads]),
            reference=np.array([head.reference for head in heads]),
        )

    def head(self, position: int) -> Head:
        """Return the head of a scored token."""
        part = slice(self.offsets[position], self.offsets[position + 1])
        return Head(self.tokens[part], self.logp[part], float(self.rest[position]), float(self.reference[position]))


HEAD_ARRAYS = tuple(item.name for item in fields(SampleHeads))

Heads = Callable[[str], SampleHeads]
"""Gives the baseline's heads of a sample by its id."""


def head_of(distributions: Distributions, row: int, token: int) -> Head:
    """Return what is stored of a row whose reference token is `token`; everything is NaN where a logit is not finite."""
    logits = distributions.logits_BV[row]
    ids = np.uint16 if len(logits) <= 1 << 16 else np.uint32
    if not distributions.finite[row]:
        return Head(np.zeros(1, ids), np.full(1, np.nan, np.float32), np.nan, np.nan)
    tokens = distributions.head(row)
    logp, rest, log_sum = distributions.split(row, tokens)
    return Head(tokens.astype(ids), logp.astype(np.float32), rest, float(logits[token]) - log_sum)


class StoredHeads:
    """The heads of samples of one engine, read as they are asked for."""

    def __init__(self, path: Path) -> None:
        file: Any = safe_open(str(path), framework="numpy")
        self._file = file
        self._arrays: dict[str, list[str]] = {}
        for key in file.keys():  # noqa: SIM118  (no mapping)
            name, _, array = key.rpartition("/")
            self._arrays.setdefault(name, []).append(array)

    @staticmethod
    def write(path: Path, samples: Iterable[tuple[str, SampleHeads]]) -> None:
        """Write the heads of samples, by their ids."""
        arrays: dict[str, npt.NDArray[Any]] = {}
        for name, heads in samples:
            stored: Mapping[str, npt.NDArray[Any]] = {array: getattr(heads, array) for array in HEAD_ARRAYS}
            if np.diff(heads.offsets).max() > LEAST_CAP:
                stored = packed(stored, LEAST_CAP)
            arrays |= {f"{name}/{array}": values for array, values in stored.items()}
        save_file(arrays, str(path))

    def sample(self, name: str) -> SampleHeads:
        """Return the heads of a sample."""
        stored = {array: self._file.get_tensor(f"{name}/{array}") for array in self._arrays[name]}
        return SampleHeads(**(unpacked(stored, LEAST_CAP) if "others" in stored else stored))


EXACT = 256
"""Tokens of a long head whose log-probabilities are kept as they are."""
STEP = 2.0**-7
"""Of the other log-probabilities, in nats."""
Arrays = Mapping[str, npt.NDArray[Any]]


def packed(arrays: Arrays, longest: int) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of a sample's heads (`SampleHeads`) as they are stored.

    Args:
        arrays: The arrays by name.
        longest: Tokens up to which a head is stored as it is.
    """
    offsets, tokens, logp = (arrays[name] for name in ("offsets", "tokens", "logp"))
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
    }


def unpacked(stored: Arrays, longest: int) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays that `packed` was given, but for the rounding of what is kept in steps."""
    offsets, rest = stored["offsets"], stored["rest"]
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
    return {"offsets": offsets, "rest": rest, "reference": stored["reference"], "tokens": tokens, "logp": logp}


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
