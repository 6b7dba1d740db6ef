"""Mean KL of policies from the FP16 cache, on the decode path of the one-pass oracle. Measurements outlive an interruption."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.artifacts.digest import json_digest
from pipeline.core.kv import FP16_POLICY, KVPolicy
from pipeline.core.scales import KVScales
from stages.engines.base import Logits
from stages.engines.oracle.engine import OracleEngine
from stages.engines.oracle.model import LayerInput
from stages.evaluate.distances.distance import Array, Distributions, Head, head_kl
from stages.evaluate.distances.scores import head_of
from stages.tune.texts import Text, TextSet

MEASURED = "measured.jsonl"
"""In the artifact while it is made: a line for each policy on each set of texts."""

ROWS = 256
"""Rows of logits that are compared at a time."""


class Bench:
    """A model and the sets of texts that policies are measured on, each policy once."""

    def __init__(self, model: Any, scales: Callable[[KVPolicy], KVScales], folder: Path) -> None:
        self.model, self._scales = model, scales
        self._path = folder / MEASURED
        self._known = dict(_lines(self._path))
        self._heads: dict[str, list[list[Head]]] = {}
        self._inputs: tuple[tuple[str, int], list[LayerInput | None]] | None = None
        self.sound = OracleEngine.from_model(model, FP16_POLICY)

    def kl(self, policy: KVPolicy, texts: TextSet, above: int = 0) -> Array:
        """Return the mean KL of each text's scored tokens, (texts,); NaN where a logit is not finite."""
        key = _key(policy, texts)
        if key not in self._known:
            inputs = self._layer_inputs(texts, above) if above else [None] * len(texts.texts)
            engine = OracleEngine.from_model(self.model, policy, self._scales(policy))
            pairs = zip(texts.texts, self._baseline(texts), inputs, strict=True)
            self._known[key] = [_mean_kl(engine, text, heads, known) for text, heads, known in pairs]
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"key": key, "kl": self._known[key]}) + "\n")
        return np.array(self._known[key])

    def _layer_inputs(self, texts: TextSet, layer: int) -> list[LayerInput | None]:
        """What reaches a layer of each text while all caches before it are at 16 bits."""
        if self._inputs is None or self._inputs[0] != (texts.name, layer):
            earlier = self._inputs[1] if self._inputs is not None else [None] * len(texts.texts)
            pairs = zip(texts.texts, earlier, strict=True)
            self._inputs = (texts.name, layer), [self.sound.layer_input(t.tokens, t.first, layer, known) for t, known in pairs]
        return self._inputs[1]

    def close(self) -> None:
        """Remove the kept measurements: the report holds what the artifact is for."""
        self._path.unlink(missing_ok=True)

    def _baseline(self, texts: TextSet) -> list[list[Head]]:
        if texts.name not in self._heads:
            self._heads[texts.name] = [_heads(self.sound, text) for text in texts.texts]
        return self._heads[texts.name]


def _key(policy: KVPolicy, texts: TextSet) -> str:
    return json_digest([policy.model_dump(exclude={"name"}), texts.name])


def _lines(path: Path) -> Sequence[tuple[str, list[float]]]:
    """What an interrupted run left; its last line may be half written."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        found.append((str(entry["key"]), [float(value) for value in entry["kl"]]))
    return found


def _heads(engine: OracleEngine, text: Text) -> list[Head]:
    found: list[Head] = []
    for rows in _distributions(engine.forced(text.tokens, text.first)):
        # Only the distance counts here, not what the text goes on with: any token serves as the reference.
        found += [head_of(rows, row, 0, check=False) for row in range(len(rows.finite))]
    return found


def _mean_kl(engine: OracleEngine, text: Text, heads: list[Head], known: LayerInput | None) -> float:
    tokens, first = text.tokens, text.first
    logits = engine.forced(tokens, first, known)
    remaining = iter(heads)
    kl = [head_kl(next(remaining), rows, row) for rows in _distributions(logits) for row in range(len(rows.finite))]
    return float(np.mean(kl))


def _distributions(logits: Logits) -> Iterator[Distributions]:
    """Give the distributions after each scored token, a few rows at a time: a comparison makes several copies of them."""
    for start in range(0, len(logits), ROWS):
        yield Distributions(logits[start : start + ROWS])
