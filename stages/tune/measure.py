"""Mean KL of policies from the FP16 cache, on the decode path of the one-pass oracle. Measurements outlive an interruption.

The texts are the samples of an evaluation in another split, in three parts that share no document. Of questions the answers are
scored, as an evaluation does it, so that a mean KL means the same here and at the gates; of prose and of a user's own texts,
everything but the first tokens.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.artifacts.digest import json_digest
from pipeline.core.errors import UserError
from pipeline.core.kv import FP16_POLICY, KVPolicy
from pipeline.core.scales import KVScales
from pipeline.planning.tuning import TuneConfig
from stages.engines.base import Logits
from stages.engines.oracle.engine import OracleEngine
from stages.engines.oracle.model import LayerInput
from stages.evaluate.distances.distance import Array, Distributions, Head, head_kl
from stages.evaluate.distances.scores import head_of
from stages.evaluate.inputs.tokens import BundleTokenizer, encode
from stages.quantize.calibration import texts_from_file
from stages.workloads import generate

PREFILLED = 16
"""First tokens of a text without an answer, which are not scored."""

PARTS = ("search", "check", "held out")
"""What each place costs alone is measured on the first; what is proposed from that, on the second, because it may owe something
to chance in the first; and what is found, on the third."""

LEAST = 2
"""Texts of a part."""


@dataclass(frozen=True)
class Text:
    """A text in tokens; those from `first` on are scored, at least one."""

    tokens: tuple[int, ...]
    first: int
    document: str


@dataclass(frozen=True)
class TextSet:
    """Texts that policies are measured on."""

    name: str
    texts: tuple[Text, ...]

    @property
    def documents(self) -> list[str]:
        """The document of each text."""
        return [text.document for text in self.texts]

    @property
    def scored(self) -> int:
        """Tokens that are scored."""
        return sum(len(text.tokens) - text.first for text in self.texts)


def parts(checkpoint: Path, config: TuneConfig, jsonl: Path | None, seed: int) -> tuple[TextSet, TextSet, TextSet]:
    """Return the texts of PARTS: half of the documents, a quarter, and a quarter."""
    tokenizer = BundleTokenizer(checkpoint)
    # The calibration draws with the seed itself.
    texts = _generated(tokenizer, config, seed + 1) if jsonl is None else _given(tokenizer, config, jsonl)
    scored = [text for text in texts if text.first < len(text.tokens)]
    documents = list(dict.fromkeys(text.document for text in scored))
    half = len(documents) // 2
    quarter = half + (len(documents) - half) // 2
    groups = (documents[:half], documents[half:quarter], documents[quarter:])
    sets = [tuple(text for text in scored if text.document in set(group)) for group in groups]
    if min(map(len, sets)) < LEAST:
        raise UserError(
            f"tune.texts={config.texts}: {len(scored)} texts of {len(documents)} documents can be scored within "
            f"tune.max_length={config.max_length}, too few for three parts; raise one of them"
        )
    search, check, held_out = (TextSet(name, members) for name, members in zip(PARTS, sets, strict=True))
    return search, check, held_out


def _generated(tokenizer: BundleTokenizer, config: TuneConfig, seed: int) -> list[Text]:
    count = max(config.texts // len(config.workloads), 4 * LEAST)
    found = []
    # Documents alternate between workloads, so that each part has some of each.
    groups = zip(*(generate(name, count, seed, split="calibration") for name in config.workloads), strict=True)
    for number, samples in enumerate(groups):
        for item in encode(samples, tokenizer, config.max_length):
            tokens = (*item.prompt, *item.reference)[: config.max_length]
            # As in an evaluation: a prompt's last token is decoded.
            found.append(Text(tokens, len(item.prompt) - 1 if item.judged else PREFILLED, f"{number}"))
    return found


def _given(tokenizer: BundleTokenizer, config: TuneConfig, jsonl: Path) -> list[Text]:
    lines = texts_from_file(jsonl, config.texts)
    encoded = [tuple(tokenizer.text_ids(text)[: config.max_length]) for text in lines]
    return [Text(tokens, PREFILLED, f"{number}") for number, tokens in enumerate(encoded)]


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
                file.write("\n" + json.dumps({"key": key, "kl": self._known[key]}))  # the line before may be half a line
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
    """What interrupted runs left; the last line of each may be half written."""
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
        found += [head_of(rows, row, 0) for row in range(len(rows.finite))]
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
