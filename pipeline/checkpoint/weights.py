"""Holds a checkpoint's safetensors and tokenizer against its config.json, both ways: from headers, nothing is guessed.

transformers fills in what is missing with random numbers, and leaves out what the configuration does not name: a file of four
layers under `num_hidden_layers: 3` is another model than its author's.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from pipeline.checkpoint.description import CheckpointInfo, read_config
from pipeline.checkpoint.files import INDEX, MOST_JSON_BYTES, read_json
from pipeline.checkpoint.quantized import TYPES, Shape
from pipeline.core.errors import UserError, short
from pipeline.core.redaction import printable

FLOATS = ("F64", "F32", "F16", "BF16")
"""Types of weights that are plain numbers."""

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
ROWS = 4096
"""Rows of two matrices that are compared at a time, so that they need little memory."""

MOST_HEADER_BYTES = 100_000_000
"""Of a safetensors file, as the format has it."""


def check_weights(info: CheckpointInfo, expected_tensors: Callable[[Path, dict[str, Any]], Mapping[str, Shape]]) -> None:
    """Refuse weights that are not those of the configuration.

    Args:
        info: The checkpoint.
        expected_tensors: That of stages.checkpoints; it is called when the files by themselves are sound.

    Raises:
        UserError: naming the file, the tensor, and what to do: a file that is no safetensors, a tensor that is missing, has
            another shape or type, is in two files, or is no part of the model.
    """
    on_disk = tensors_on_disk(info)
    described = {key: value for key, value in read_config(info.path).items() if key != "quantization_config"}
    expected = expected_tensors(info.path, described)
    shapes = {name: shape for name, (_, shape) in on_disk.items()}
    plain = [(name, name, shape) for name, shape in shapes.items()]
    found = set()
    for stored, name, shape in plain if info.quantized is None else info.quantized.plain(shapes, expected):
        file = on_disk[stored][0]
        found.add(name)
        if name not in expected and not _is_computed(name):
            raise UserError(
                f"model.path={info.path}: {file} holds {printable(stored[:200])}, which config.json has no place for "
                f"({info.architecture} of {info.shape.layers} layers); give the config.json that belongs to the weights"
            )
        if shape != expected.get(name, shape):
            raise UserError(
                f"model.path={info.path}: {file}: {stored} has shape {list(shape)}, config.json makes it "
                f"{list(expected[name])}; give the config.json that belongs to the weights"
            )
    missing = sorted(expected.keys() - found)
    if missing:
        raise UserError(
            f"model.path={info.path}: {missing[0]} is missing, and {len(missing) - 1} more tensors of {info.architecture} with "
            f"{info.shape.layers} layers; give the complete checkpoint"
        )
    if HEAD in found and HEAD not in expected and not _are_equal(info.path, on_disk, HEAD, EMBEDDING):
        raise UserError(
            f"model.path={info.path}: the weights hold {HEAD}, which differs from {EMBEDDING}, and config.json ties "
            "them (tie_word_embeddings, true if it is left out in some families): engines would differ in which they take; set "
            "tie_word_embeddings=false, or take the tensor out of the file, whichever the model was trained with"
        )


def tensors_on_disk(info: CheckpointInfo) -> dict[str, tuple[str, Shape]]:
    """Return the file and the shape of every tensor that a checkpoint holds. Raises UserError for files that are not sound."""
    found: dict[str, tuple[str, Shape]] = {}
    types = FLOATS if info.quantized is None else (*FLOATS, *TYPES)
    codes = []
    for file in info.weight_files:
        for name, dtype, shape in _tensors(info.path, file):
            if name in found:
                raise UserError(f"model.path={info.path}: {name} is in both {found[name][0]} and {file}; keep one of them")
            if dtype not in types:
                raise UserError(
                    f"model.path={info.path}: {file}: {printable(name[:200])} is of type {dtype}; give weights of "
                    f"{', '.join(types)}"
                )
            found[name] = file, shape
            codes += [name] if dtype not in FLOATS else []
    for name in codes:
        if info.quantized is not None and info.quantized.layout(name.rpartition(".")[0], found) is None:
            raise UserError(
                f"model.path={info.path}: {found[name][0]}: {printable(name[:200])} holds codes without the scales that "
                f"{info.quantized.title} has beside them; give the complete checkpoint"
            )
    _check_index(info, {name: file for name, (file, _) in found.items()})
    return found


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
"""Those of transformers that models of these families name: it takes them whatever code the checkpoint names beside them."""


def check_tokenizer(info: CheckpointInfo) -> None:
    """Refuse files of a tokenizer that are no JSON, and what its library would take for a tokenizer of this model.

    What the library itself refuses, `stages.opening` says.

    Raises:
        UserError: naming the file, what is wrong in it, and what to do.
    """
    content: dict[str, dict[str, Any]] = {}
    for name in info.other_files:
        if name.endswith(".json"):
            content[name] = read_json(info.path, name)
        elif (info.path / name).stat().st_size > MOST_JSON_BYTES:
            raise UserError(f"model.path={info.path}: {name} should have {MOST_JSON_BYTES:,} bytes at most; download it again")
    tokenizer = content.get("tokenizer.json", {})
    model, added = tokenizer.get("model"), tokenizer.get("added_tokens", [])
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    numbers = [number for number in (vocabulary if isinstance(vocabulary, dict) else {}).values() if type(number) is int]
    problem = None
    if max(numbers, default=0) >= info.vocab_size:
        problem = f"its largest token is {max(numbers)}, the model's vocab_size is {info.vocab_size}"
    elif isinstance(model, dict) and model.get("dropout"):
        problem = f"model.dropout must be null, got {short(model['dropout'])}: a text would become other tokens each time"
    elif not isinstance(added, list) or not all(
        isinstance(token, dict) and isinstance(token.get("content"), str) and type(token.get("id")) is int for token in added
    ):
        problem = "added_tokens must be a list of tokens, each with id and content"
    problem = problem or _panic(tokenizer.get("post_processor"))
    if problem is not None:
        raise UserError(f"model.path={info.path}: tokenizer.json: {problem}; give the checkpoint its own tokenizer")
    about = content.get("tokenizer_config.json", {})
    if about.get("auto_map") and str(about.get("tokenizer_class")) not in TOKENIZER_CLASSES:
        raise UserError(
            f"model.path={info.path}: tokenizer_config.json: auto_map names code of the checkpoint's own, which is not run; "
            f"leave it out, and give tokenizer_class as PreTrainedTokenizerFast where tokenizer.json is all that it takes"
        )


def _panic(post: object) -> str | None:
    """Describe a token around a text that the library would panic over, which prints lines of its own."""
    for part in [post, *(post.get("processors") or [])] if isinstance(post, dict) else ():
        written = [*(part.get("single") or []), *(part.get("pair") or [])] if isinstance(part, dict) else []
        for piece in (piece["SpecialToken"] for piece in written if isinstance(piece, dict) and "SpecialToken" in piece):
            if piece.get("id") not in part.get("special_tokens", {}):
                return f"post_processor writes {short(piece.get('id'))}, which its special_tokens lack"
    return None


def tokens_beyond(info: CheckpointInfo) -> list[str]:
    """Return the texts of added tokens that the model has no row for, such as Gemma 3's picture in its models of text alone."""
    if "tokenizer.json" not in info.other_files:
        return []
    added = read_json(info.path, "tokenizer.json").get("added_tokens", [])
    return [token["content"] for token in added if token["id"] >= info.vocab_size and token["content"]]


def _is_computed(name: str) -> bool:
    """Whether transformers makes a tensor that the model has no place for: rotary frequencies, a tied output matrix."""
    return name.endswith(".rotary_emb.inv_freq") or name == HEAD


def _are_equal(path: Path, on_disk: Mapping[str, tuple[str, Shape]], one: str, other: str) -> bool:
    """Whether two matrices of a checkpoint hold the same numbers, of any types."""
    if one not in on_disk or other not in on_disk or on_disk[one][1] != on_disk[other][1]:
        return False
    with safe_open(path / on_disk[one][0], "pt") as first, safe_open(path / on_disk[other][0], "pt") as second:
        pair = first.get_slice(one), second.get_slice(other)
        starts = range(0, on_disk[one][1][0], ROWS)
        return all(bool((pair[0][at : at + ROWS].double() == pair[1][at : at + ROWS].double()).all()) for at in starts)


def _tensors(path: Path, file: str) -> Iterator[tuple[str, str, Shape]]:
    try:
        with (path / file).open("rb") as stream:  # the library maps the whole file before it looks at the header
            length = int.from_bytes(stream.read(8), "little")
        if not 2 <= length <= min(MOST_HEADER_BYTES, (path / file).stat().st_size - 8):
            raise SafetensorError(f"its header should have {length:,} bytes")
        with safe_open(path / file, framework="numpy") as content:
            for name in content.keys():  # noqa: SIM118  (not a mapping)
                part = content.get_slice(name)
                yield name, part.get_dtype(), tuple(part.get_shape())
    except (SafetensorError, OSError) as error:
        raise UserError(f"model.path={path}: {file} is not a complete safetensors file ({error}); download it again") from None


def _check_index(info: CheckpointInfo, found: dict[str, str]) -> None:
    """Refuse an index that names another file for a tensor than the one that holds it."""
    if INDEX not in info.other_files:
        return
    weight_map = read_json(info.path, INDEX)["weight_map"]
    wrong = sorted(name for name in weight_map.keys() | found.keys() if weight_map.get(name) != found.get(name))
    if wrong:
        named, held = (json.dumps(place.get(wrong[0])) for place in (weight_map, found))
        raise UserError(
            f"model.path={info.path}: {INDEX} puts {wrong[0]} into {named}, it is in {held}; "
            "give the index that was saved with the weights"
        )
