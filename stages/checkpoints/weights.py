"""Comparison of a checkpoint's safetensors and tokenizer with its config.json, from the headers of the files.

transformers initializes missing tensors randomly and ignores tensors that the configuration does not describe. A file of four
layers with `num_hidden_layers: 3` would therefore load as a different model.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from stages.checkpoints.description import CheckpointInfo, read_config
from stages.checkpoints.files import INDEX, MAX_JSON_BYTES, read_json, refusal
from stages.checkpoints.loading import expected_tensors
from stages.checkpoints.quantized import MODELOPT_FILE, TYPES, Shape
from stages.core.errors import short
from stages.core.redaction import printable

FLOATS = ("F64", "F32", "F16", "BF16")

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
FREQUENCIES = ".rotary_emb.inv_freq"

TOGETHER = "give weights and a config.json that were saved together (model.save_pretrained)"
"""Fix for weights and a configuration of different models."""


def check_weights(info: CheckpointInfo) -> None:
    """Raise UserError, which names the file, the tensor and the fix, for weights that do not match config.json.

    Refuses files other than safetensors, and tensors that are missing, have another shape or type, are in two files, or are not
    part of the model. Imports torch and transformers after all files have been read.
    """
    on_disk = tensors_on_disk(info)
    described = {key: value for key, value in read_config(info.path).items() if key != "quantization_config"}
    frequencies = {}
    for name, (file, _) in on_disk.items():
        if name.endswith(FREQUENCIES):
            with safe_open(info.path / file, "pt") as content:
                frequencies[name] = content.get_tensor(name)
    expected = expected_tensors(info.path, described, frequencies)
    shapes = {name: shape for name, (_, shape) in on_disk.items()}
    plain = [(name, name, shape) for name, shape in shapes.items()]
    seen_names = set()
    model = f"{info.architecture} of {info.shape.layers} layers"
    for stored, name, shape in plain if info.quantized is None else info.quantized.plain_tensors(shapes, expected):
        file = on_disk[stored][0]
        seen_names.add(name)
        # transformers computes rotary frequencies and a tied output matrix itself.
        if name not in expected and name != HEAD and not name.endswith(FREQUENCIES):
            raise refusal(info.path, f"{file} holds {printable(stored[:200])}, which is not part of the {model}; {TOGETHER}")
        if shape != expected.get(name, shape):
            raise refusal(
                info.path, f"{file}: {stored} has shape {list(shape)}, config.json implies {list(expected[name])}; {TOGETHER}"
            )
    missing = sorted(expected.keys() - seen_names)
    if missing:
        more = f", and so are {len(missing) - 1} more" if len(missing) > 1 else ""
        raise refusal(info.path, f"{missing[0]} of the {model} is missing{more}; give the complete checkpoint")
    if HEAD in seen_names and HEAD not in expected and not _are_equal(info.path, on_disk, HEAD, EMBEDDING):
        raise refusal(
            info.path,
            f"{HEAD} differs from {EMBEDDING} in the weights, but config.json says that both are one tensor "
            "(tie_word_embeddings; in some families true by default); set tie_word_embeddings=false if the model was trained "
            f"with two tensors, or else remove {HEAD} from the file",
        )


def tensors_on_disk(info: CheckpointInfo) -> dict[str, tuple[str, Shape]]:
    """Return the file and the shape of every tensor in a checkpoint. Raises UserError for invalid files."""
    tensors: dict[str, tuple[str, Shape]] = {}
    types = FLOATS if info.quantized is None else (*FLOATS, *TYPES)
    codes = []
    for file in info.weight_files:
        for name, dtype, shape in _tensors(info.path, file):
            if name in tensors:
                raise refusal(info.path, f"{name} is in both {tensors[name][0]} and {file}; keep one of them")
            if dtype not in types:
                raise refusal(
                    info.path, f"{file}: {printable(name[:200])} is of type {dtype}; give weights of {', '.join(types)}"
                )
            tensors[name] = file, shape
            codes += [name] if dtype not in FLOATS else []
    if info.quantized is not None and info.quantized.layouts and not codes:
        declared = f"quantization_config (or {MODELOPT_FILE}) declares weights in the form of {info.quantized.title}"
        raise refusal(info.path, f"{declared}, but the files hold none; remove it if they are plain, or give quantized ones")
    for name in codes:
        if info.quantized is not None and info.quantized.layout(name.rpartition(".")[0], tensors) is None:
            lacking = f"holds codes without the scales of {info.quantized.title}"
            raise refusal(info.path, f"{tensors[name][0]}: {printable(name[:200])} {lacking}; give the complete checkpoint")
    _check_index(info, {name: file for name, (file, _) in tensors.items()})
    return tensors


TOKENIZER_CLASSES = {
    f"{name}{fast}"
    for name in (
        "PreTrainedTokenizer",
        "LlamaTokenizer",
        "GPT2Tokenizer",
        "Qwen2Tokenizer",
        "GemmaTokenizer",
        "CodeLlamaTokenizer",
    )
    for fast in ("", "Fast")
}
"""transformers' own tokenizer classes. They are safe to load even if the checkpoint also ships code."""


def check_tokenizer(info: CheckpointInfo) -> None:
    """Raise UserError for tokenizer files that are not JSON, or wrong in a way that the tokenizer library accepts.

    `stages.checkpoints.intake.opening` reports the files that the library refuses.
    """
    content: dict[str, dict[str, Any]] = {}
    for name in info.other_files:
        if name.endswith(".json"):
            content[name] = read_json(info.path, name)
        elif (info.path / name).stat().st_size > MAX_JSON_BYTES:
            raise refusal(info.path, f"{name} should have {MAX_JSON_BYTES:,} bytes at most; download it again")
    tokenizer = content.get("tokenizer.json", {})
    model, added = tokenizer.get("model"), tokenizer.get("added_tokens", [])
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    numbers = [number for number in (vocabulary if isinstance(vocabulary, dict) else {}).values() if type(number) is int]
    problem = None
    if max(numbers, default=0) >= info.vocab_size:
        problem = f"its largest token is {max(numbers)}, the model's vocab_size is {info.vocab_size}"
    elif isinstance(model, dict) and model.get("dropout"):
        problem = f"model.dropout must be null, got {short(model['dropout'])}: a text would be encoded differently each time"
    elif not isinstance(added, list) or not all(
        isinstance(token, dict) and isinstance(token.get("content"), str) and type(token.get("id")) is int for token in added
    ):
        problem = "added_tokens must be a list of tokens, each with id and content"
    if problem is not None:
        raise refusal(info.path, f"tokenizer.json: {problem}; give the checkpoint its own tokenizer")
    config = content.get("tokenizer_config.json", {})
    if config.get("auto_map") and str(config.get("tokenizer_class")) not in TOKENIZER_CLASSES:
        raise refusal(
            info.path,
            "tokenizer_config.json: auto_map names code in the checkpoint, which kvgate does not run; remove it, and give "
            "tokenizer_class as PreTrainedTokenizerFast if tokenizer.json suffices",
        )


def tokens_beyond_vocabulary(info: CheckpointInfo) -> list[str]:
    """Return the added tokens without a row in the model, for example the image token in text-only models of Gemma 3."""
    if "tokenizer.json" not in info.other_files:
        return []
    added = read_json(info.path, "tokenizer.json").get("added_tokens", [])
    return [token["content"] for token in added if token["id"] >= info.vocab_size and token["content"]]


def _are_equal(path: Path, on_disk: Mapping[str, tuple[str, Shape]], name: str, other: str) -> bool:
    """Return whether two matrices of a checkpoint hold equal numbers, regardless of their types."""
    if name not in on_disk or other not in on_disk or on_disk[name][1] != on_disk[other][1]:
        return False
    with safe_open(path / on_disk[name][0], "pt") as first, safe_open(path / on_disk[other][0], "pt") as second:
        return bool((first.get_tensor(name) == second.get_tensor(other)).all())


def _tensors(path: Path, file: str) -> Iterator[tuple[str, str, Shape]]:
    try:
        with safe_open(path / file, framework="numpy") as content:
            for name in content.keys():  # noqa: SIM118  (not a mapping)
                part = content.get_slice(name)
                yield name, part.get_dtype(), tuple(part.get_shape())
    except SafetensorError as error:
        raise refusal(path, f"{file} is not a complete safetensors file ({error}); download it again") from None


def _check_index(info: CheckpointInfo, places: dict[str, str]) -> None:
    """Raise UserError if the index omits a tensor, names a missing tensor, or assigns a tensor to the wrong file."""
    if INDEX not in info.other_files:
        return
    weight_map = read_json(info.path, INDEX)["weight_map"]
    misplaced = sorted(name for name in weight_map.keys() | places.keys() if weight_map.get(name) != places.get(name))
    if misplaced:
        indexed, stored = (json.dumps(place.get(misplaced[0])) for place in (weight_map, places))
        raise refusal(
            info.path,
            f"{INDEX} puts {misplaced[0]} into {indexed}, but it is in {stored}; give the index saved with the weights",
        )
