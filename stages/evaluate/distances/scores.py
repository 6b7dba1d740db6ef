"""Storage format of the baseline's distributions, which are stored as heads.

A head lists the most likely tokens with their log-probabilities until all other tokens have less than REST_MASS. Its length
depends on the distribution: tens of tokens if the model is certain, thousands if it is uncertain. A head has at most
vocab_size / 8 tokens (LEAST_CAP for small vocabularies).

`logprobs.safetensors` holds the arrays of `SampleHeads` for each sample, named `<id>/<array>`. If a head is longer than
LEAST_CAP, the sample's arrays are compressed to a third of their size. The EXACT most likely tokens of a head are stored
unchanged. The other tokens are sorted by id and stored as gaps, which are small, with log-probabilities in steps of STEP.
Reading shifts their log-probabilities so that the total mass is 1. The KL between a stored and an original head is at most
STEP ** 2 / 24 = 2.5e-6 nats (tests/unit/evaluate/test_evaluate_scores.py).
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
    """The concatenated heads of a sample's N scored tokens."""

    offsets: npt.NDArray[np.int64]
    """Boundaries (N + 1): head n is tokens[offsets[n] : offsets[n + 1]]."""
    tokens: Tokens
    logp: npt.NDArray[np.float32]
    rest: npt.NDArray[np.float64]
    """Mass of the rest (N)."""
    reference: npt.NDArray[np.float64]
    """Log-probabilities of the reference tokens (N)."""

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
"""Returns the baseline's heads of a sample, given the sample's id."""


def head_of(distributions: Distributions, row: int, token: int) -> Head:
    """Return the head of a row. `token`: the reference token. All values are NaN if a logit is not finite."""
    logits = distributions.logits_BV[row]
    ids = np.uint16 if len(logits) <= 1 << 16 else np.uint32
    if not distributions.finite[row]:
        return Head(np.zeros(1, ids), np.full(1, np.nan, np.float32), np.nan, np.nan)
    tokens = distributions.head(row)
    logp, rest, log_sum = distributions.split(row, tokens)
    return Head(tokens.astype(ids), logp.astype(np.float32), rest, float(logits[token]) - log_sum)


class StoredHeads:
    """The stored heads of one engine, read on demand."""

    def __init__(self, path: Path) -> None:
        file: Any = safe_open(str(path), framework="numpy")
        self._file = file
        self._arrays: dict[str, list[str]] = {}
        for key in file.keys():  # noqa: SIM118  (no mapping)
            name, _, array = key.rpartition("/")
            self._arrays.setdefault(name, []).append(array)

    @staticmethod
    def write(path: Path, samples: Iterable[tuple[str, SampleHeads]]) -> None:
        """Write pairs of a sample's id and its heads."""
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
"""Number of tokens in a long head whose log-probabilities are stored unchanged."""
STEP = 2.0**-7
"""Quantization step of the other log-probabilities, in nats."""
Arrays = Mapping[str, npt.NDArray[Any]]


def packed(arrays: Arrays, longest: int) -> dict[str, npt.NDArray[Any]]:
    """Compress the arrays of a sample's heads (`SampleHeads`).

    Args:
        arrays: The arrays by name.
        longest: Maximum tokens of a head that is not compressed.
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
    """Reverse `packed`. The result differs only by the rounding of log-probabilities to STEP."""
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
    """Return (start, stop) of heads longer than `longest`."""
    places = zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)
    return [(start, stop) for start, stop in places if stop - start > longest]


def _steps(logp: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    return np.clip(np.rint(logp.astype(np.float64) / -STEP), 0, 2**32 - 1)


def _compressed(*columns: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Compress integers. All lowest bytes come first, then all second bytes, and so on, so that equal bytes are adjacent."""
    planes = (column.astype("<u4").view(np.uint8).reshape(-1, 4).T.tobytes() for column in columns)
    # Gaps and steps contain runs of equal bytes but no longer repetitions, so a search for matches would be wasted.
    compressor = zlib.compressobj(strategy=zlib.Z_RLE)
    return np.frombuffer(compressor.compress(b"".join(planes)) + compressor.flush(), np.uint8)


def _decompressed(data: npt.NDArray[np.uint8], columns: int) -> list[npt.NDArray[np.uint32]]:
    planes = np.frombuffer(zlib.decompress(data.tobytes()), np.uint8).reshape(columns, 4, -1)
    return [np.ascontiguousarray(plane.T).view("<u4").reshape(-1) for plane in planes]
