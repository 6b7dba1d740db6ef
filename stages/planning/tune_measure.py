"""Measures policies' mean KL from the FP16 cache with the reference engine's one-pass decode. An interrupted run can resume.

The texts are an evaluation's workloads in another split, in two parts that share no document. For questions only the answers
are scored, as in an evaluation, so that a mean KL has the same meaning here and in the gates. For prose and the user's own
texts, all tokens except the first ones are scored.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stages.core.digest import json_digest
from stages.core.errors import UserError
from stages.engines.interface import Logits
from stages.engines.reference.engine import TorchEngine
from stages.engines.reference.model import LayerInput
from stages.evaluate.distances.distance import Array, Distributions, Head, head_kl, head_of
from stages.evaluate.inputs.tokens import BundleTokenizer, encode
from stages.planning.tuning import MAX_LENGTH, TuneConfig
from stages.policies.policy import FP16_POLICY, KVPolicy
from stages.policies.scales import KVScales
from stages.quantize.calibration import texts_from_file
from stages.workloads.generated import generate

PREFILLED = 16
"""Number of first tokens that are not scored in texts without an answer."""

LEAST = 2
"""Minimum texts per part."""


@dataclass(frozen=True)
class Text:
    """A tokenized text. Tokens from index `first` on are scored, at least one."""

    tokens: tuple[int, ...]
    first: int
    document: str


@dataclass(frozen=True)
class TextSet:
    """Texts for measuring policies."""

    name: str
    texts: tuple[Text, ...]

    @property
    def scored(self) -> int:
        """Number of scored tokens."""
        return sum(len(text.tokens) - text.first for text in self.texts)


def parts(checkpoint: Path, config: TuneConfig, jsonl: Path | None, seed: int) -> tuple[TextSet, TextSet]:
    """Return two sets of texts: one for measuring each place alone, and one for measuring whole policies.

    They share no document, because a search may overfit the texts that it measured each place on.


    Raises UserError if a part has fewer than LEAST texts.
    """
    tokenizer = BundleTokenizer(checkpoint)
    # The next seed, because the calibration uses the seed itself.
    texts = _generated(tokenizer, config, seed + 1) if jsonl is None else _given(tokenizer, config, jsonl)
    scored = [text for text in texts if text.first < len(text.tokens)]
    documents = list(dict.fromkeys(text.document for text in scored))
    first = set(documents[: len(documents) // 2])
    search = TextSet("search", tuple(text for text in scored if text.document in first))
    check = TextSet("check", tuple(text for text in scored if text.document not in first))
    if min(len(search.texts), len(check.texts)) < LEAST:
        raise UserError(
            f"tune.texts={config.texts}: {len(scored)} texts of {len(documents)} documents can be scored within "
            f"{MAX_LENGTH} tokens, too few for two parts; raise it, or give longer documents"
        )
    return search, check


def _generated(tokenizer: BundleTokenizer, config: TuneConfig, seed: int) -> list[Text]:
    count = max(config.texts // len(config.workloads), 4 * LEAST)
    found = []
    # Documents alternate between workloads, so that every part contains all workloads.
    groups = zip(*(generate(name, count, seed, split="calibration") for name in config.workloads), strict=True)
    for number, samples in enumerate(groups):
        for item in encode(samples, tokenizer, MAX_LENGTH):
            tokens = (*item.prompt, *item.reference)[:MAX_LENGTH]
            # A prompt's last token is decoded, as in an evaluation.
            found.append(Text(tokens, len(item.prompt) - 1 if item.judged else PREFILLED, f"{number}"))
    return found


def _given(tokenizer: BundleTokenizer, config: TuneConfig, jsonl: Path) -> list[Text]:
    lines = texts_from_file(jsonl, config.texts)
    encoded = [tuple(tokenizer.text_ids(text)[:MAX_LENGTH]) for text in lines]
    return [Text(tokens, PREFILLED, f"{number}") for number, tokens in enumerate(encoded)]


MEASURED = "measured.jsonl"
"""File in the unfinished artifact with one line per policy and set of texts."""

ROWS = 256
"""Rows of logits per comparison."""


class Bench:
    """Measures policies of one model. Results are saved, so that each policy is measured once per set of texts."""

    def __init__(self, model: Any, scales: Callable[[KVPolicy], KVScales], folder: Path) -> None:
        self.model, self._scales = model, scales
        self._path = folder / MEASURED
        self._known = dict(_lines(self._path))
        self._heads: dict[str, list[list[Head]]] = {}
        self._inputs: tuple[tuple[str, int], list[LayerInput | None]] | None = None
        self.sound = TorchEngine.from_model(model, FP16_POLICY)

    def kl(self, policy: KVPolicy, texts: TextSet, above: int = 0) -> Array:
        """Return the mean KL of the scored tokens per text, (texts,); NaN if a logit is not finite.

        `above`: if the policy keeps all layers below this index at 16 bits, their outputs are computed once and reused.
        """
        key = json_digest([policy.model_dump(exclude={"name"}), texts.name])
        if key not in self._known:
            inputs = self._layer_inputs(texts, above) if above else [None] * len(texts.texts)
            engine = TorchEngine.from_model(self.model, policy, self._scales(policy))
            pairs = zip(texts.texts, self._baseline(texts), inputs, strict=True)
            self._known[key] = []
            for text, heads, known in pairs:
                remaining = iter(heads)
                logits = engine.forced(text.tokens, text.first, known)
                kl = [head_kl(next(remaining), rows, i) for rows in _distributions(logits) for i in range(len(rows.finite))]
                self._known[key].append(float(np.mean(kl)))
            with self._path.open("a", encoding="utf-8") as file:
                # The line break comes first, because an interrupted run may have left half a line.
                file.write("\n" + json.dumps({"key": key, "kl": self._known[key]}))
        return np.array(self._known[key])

    def _layer_inputs(self, texts: TextSet, layer: int) -> list[LayerInput | None]:
        """Return the texts' inputs of a layer, computed with 16-bit caches in all earlier layers."""
        if self._inputs is None or self._inputs[0] != (texts.name, layer):
            earlier = self._inputs[1] if self._inputs is not None else [None] * len(texts.texts)
            pairs = zip(texts.texts, earlier, strict=True)
            self._inputs = (texts.name, layer), [self.sound.layer_input(t.tokens, t.first, layer, known) for t, known in pairs]
        return self._inputs[1]

    def close(self) -> None:
        """Remove the saved measurements: the finished artifact contains the report instead."""
        self._path.unlink(missing_ok=True)

    def _baseline(self, texts: TextSet) -> list[list[Head]]:
        if texts.name not in self._heads:
            logits = (self.sound.forced(text.tokens, text.first) for text in texts.texts)
            # Only distances are used here, so the reference token is arbitrary.
            self._heads[texts.name] = [
                [head_of(rows, row, 0) for rows in _distributions(one) for row in range(len(rows.finite))] for one in logits
            ]
        return self._heads[texts.name]


def _lines(path: Path) -> Sequence[tuple[str, list[float]]]:
    """Return (key, KL per text) from interrupted runs, skipping lines that were not completely written."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        found.append((str(entry["key"]), [float(value) for value in entry["kl"]]))
    return found


def _distributions(logits: Logits) -> Iterator[Distributions]:
    """Yield the distributions of the scored tokens, ROWS at a time, because a comparison makes several copies."""
    for start in range(0, len(logits), ROWS):
        yield Distributions(logits[start : start + ROWS])
