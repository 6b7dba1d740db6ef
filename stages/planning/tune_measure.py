"""Measures the mean KL of policies from the FP16 cache. An interrupted run can resume.

The reference engine decodes each text in one pass. The texts come from another split of an evaluation's workloads, or from the
user's file. They are divided into two parts that share no document.

For questions only the answers are scored, as in an evaluation, so that a mean KL has the same meaning here and in the gates.
For prose and the user's own texts, all tokens except the first ones are scored.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from stages.core.digest import json_digest
from stages.core.errors import UserError
from stages.engines.interface import Logits
from stages.engines.reference.engine import TorchEngine
from stages.engines.reference.model import LayerInput
from stages.evaluate.distances.distance import Array, Distributions, LogProbs, kl_from_logprobs, truncate_row
from stages.evaluate.inputs.tokens import BundleTokenizer, encode
from stages.planning.tune_records import MAX_LENGTH, TuneConfig
from stages.policies.policy import FP16_POLICY, KVPolicy
from stages.policies.scales import KVScales
from stages.quantize.calibration import texts_from_file
from stages.workloads.generated import generate

PREFILLED = 16
"""Number of first tokens that are not scored in texts without an answer."""

LEAST = 2
"""Minimum texts per part."""


class Text(NamedTuple):
    """A tokenized text. The next-token predictions after each token from index `first` on are scored, at least one."""

    tokens: tuple[int, ...]
    first: int
    document: str


SEARCH, CHECK = "search", "check"
"""Sets of texts: one for measuring each place alone, and one for measuring whole policies."""


def split_texts(checkpoint: Path, config: TuneConfig, jsonl: Path | None, seed: int) -> dict[str, list[Text]]:
    """Return the texts of SEARCH and CHECK.

    They share no document, because a search may overfit the texts that it measured each place on.

    Raises UserError if a set has fewer than LEAST texts.
    """
    tokenizer = BundleTokenizer(checkpoint)
    # The next seed, because the calibration uses the seed itself.
    texts = _generate_texts(tokenizer, config, seed + 1) if jsonl is None else _read_texts(tokenizer, config, jsonl)
    scored = [text for text in texts if text.first < len(text.tokens)]
    documents = list(dict.fromkeys(text.document for text in scored))
    found: dict[str, list[Text]] = {SEARCH: [], CHECK: []}
    for text in scored:
        found[SEARCH if documents.index(text.document) < len(documents) // 2 else CHECK].append(text)
    if min(map(len, found.values())) < LEAST:
        raise UserError(
            f"tune.texts={config.texts}: {len(scored)} texts of {len(documents)} documents can be scored within "
            f"{MAX_LENGTH} tokens, too few for two parts; raise it, or give longer documents"
        )
    return found


def _generate_texts(tokenizer: BundleTokenizer, config: TuneConfig, seed: int) -> list[Text]:
    count = max(config.texts // len(config.workloads), 4 * LEAST)
    texts = []
    # A document is one sample of each workload, so that every part contains all workloads.
    groups = zip(*(generate(name, count, seed, split="calibration") for name in config.workloads), strict=True)
    for number, samples in enumerate(groups):
        for item in encode(samples, tokenizer, MAX_LENGTH):
            # As in an evaluation, a prompt's last token is decoded, and the last token is scored but not fed.
            tokens = (*item.prompt, *item.reference[:-1])[:MAX_LENGTH]
            texts.append(Text(tokens, len(item.prompt) - 1 if item.sample.judged else PREFILLED, f"{number}"))
    return texts


def _read_texts(tokenizer: BundleTokenizer, config: TuneConfig, jsonl: Path) -> list[Text]:
    lines = texts_from_file(jsonl, config.texts)
    encoded = [tuple(tokenizer.text_ids(text)[:MAX_LENGTH]) for text in lines]
    return [Text(tokens, PREFILLED, f"{number}") for number, tokens in enumerate(encoded)]


MEASURED = "measured.jsonl"
"""File in the unfinished artifact with one line per policy and set of texts: key -> KL per text."""

ROWS = 256
"""Rows of logits per comparison."""


class Bench:
    """Measures policies of one model. Results are saved, so that each policy is measured once per set of texts."""

    def __init__(
        self, model: Any, texts: Mapping[str, Sequence[Text]], scales: Callable[[KVPolicy], KVScales], folder: Path
    ) -> None:
        self.model, self._texts, self._scales = model, texts, scales
        self._path = folder / MEASURED
        self._known = dict[str, list[float]]()
        for line in self._path.read_text(encoding="utf-8").splitlines() if self._path.is_file() else ():
            with suppress(ValueError):  # an interrupted run may have left half a line
                self._known |= json.loads(line)
        self._logprobs = dict[str, list[list[LogProbs]]]()
        self._inputs: tuple[tuple[str, int], list[LayerInput | None]] | None = None
        self.sound = TorchEngine.from_model(model, FP16_POLICY)

    def kl(self, policy: KVPolicy, name: str, above: int = 0) -> Array:
        """Return the mean KL of the scored tokens per text of a set, (texts,); NaN if a logit is not finite.

        `above`: number of first layers that the policy keeps at 16 bits. The inputs of the next layer are computed once and
        reused. The default, 0, is right for every policy.
        """
        key = json_digest([policy.model_dump(exclude={"name"}), name])
        if key not in self._known:
            texts = self._texts[name]
            inputs = self._layer_inputs(name, above) if above else [None] * len(texts)
            engine = TorchEngine.from_model(self.model, policy, self._scales(policy))
            self._known[key] = []
            for text, logprobs, layer_input in zip(texts, self._baseline(name), inputs, strict=True):
                remaining = iter(logprobs)
                logits = engine.forced(text.tokens, text.first, layer_input)
                kl = [
                    kl_from_logprobs(next(remaining), rows, i)
                    for rows in _distributions(logits)
                    for i in range(len(rows.finite))
                ]
                self._known[key].append(float(np.mean(kl)))
            with self._path.open("a", encoding="utf-8") as file:
                file.write("\n" + json.dumps({key: self._known[key]}))
        return np.array(self._known[key])

    def _layer_inputs(self, name: str, layer: int) -> list[LayerInput | None]:
        """Return the texts' inputs of a layer, computed with 16-bit caches in all earlier layers."""
        if self._inputs is None or self._inputs[0] != (name, layer):
            earlier = self._inputs[1] if self._inputs is not None else [None] * len(self._texts[name])
            pairs = zip(self._texts[name], earlier, strict=True)
            self._inputs = (name, layer), [self.sound.layer_input(t.tokens, t.first, layer, known) for t, known in pairs]
        return self._inputs[1]

    def close(self) -> None:
        """Remove the saved measurements: the finished artifact contains the report instead."""
        self._path.unlink(missing_ok=True)

    def _baseline(self, name: str) -> list[list[LogProbs]]:
        if name not in self._logprobs:
            logits = (self.sound.forced(text.tokens, text.first) for text in self._texts[name])
            # Only distances are used here, so the reference token is arbitrary.
            self._logprobs[name] = [
                [truncate_row(rows, row, 0) for rows in _distributions(part) for row in range(len(rows.finite))]
                for part in logits
            ]
        return self._logprobs[name]


def _distributions(logits: Logits) -> Iterator[Distributions]:
    """Yield the distributions of the scored tokens, ROWS at a time, because a comparison makes several copies."""
    for start in range(0, len(logits), ROWS):
        yield Distributions(logits[start : start + ROWS])
