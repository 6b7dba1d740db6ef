"""The tokenizer in a GGUF's metadata (`tokenizer.*`), checked.

llama.cpp defines the keys in src/llama-vocab.cpp; its convert_hf_to_gguf.py writes them.
"""

from dataclasses import dataclass
from math import isfinite
from typing import Any

from stages.checkpoints.gguf.header import Header

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Values of tokenizer.ggml.token_type. Control tokens are special; user-defined tokens are matched before text is split."""

CONTRACTIONS = "'s|'t|'re|'ve|'m|'ll|'d"
GPT2 = rf"{CONTRACTIONS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


def _split_pattern(words: str, digits: str, after_symbols: str = r"[\r\n]*") -> str:
    """Return the regular expression of Llama 3, Qwen 2 and Tekken: words, digits, symbols, blank lines, spaces."""
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+{after_symbols}|\s*[\r\n]+|\s+(?!\S)|\s+"


WORDS = rf"(?i:{CONTRACTIONS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
CASED_WORDS = rf"[^\r\n\p{{L}}\p{{N}}]?[{UPPER}]*[{LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{UPPER}]+[{LOWER}]*"


@dataclass(frozen=True)
class Splitter:
    """Rules of a byte-level BPE for splitting text into words. Merges do not cross words."""

    patterns: tuple[str, ...]
    """Regular expressions in order; every pattern splits the pieces of the previous pattern."""
    nfc: bool = False
    whole_words: bool = False
    """Whether a word that is in the vocabulary becomes that token without merges."""
    adds_bos: bool = False
    """Whether texts begin with BOS if tokenizer.ggml.add_bos_token is missing."""


DIGIT_BY_DIGIT = Splitter((r"\p{N}", GPT2))
LLAMA3 = Splitter((_split_pattern(WORDS, r"\p{N}{1,3}"),), whole_words=True, adds_bos=True)

SPLITTERS = {
    "gpt-2": Splitter((GPT2,)),
    "smollm": DIGIT_BY_DIGIT,
    "starcoder": DIGIT_BY_DIGIT,
    "refact": DIGIT_BY_DIGIT,
    "llama-bpe": LLAMA3,
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
    "qwen2": Splitter((_split_pattern(WORDS, r"\p{N}"),), nfc=True),
    "tekken": Splitter((_split_pattern(CASED_WORDS, r"\p{N}", r"[\r\n/]*"),), whole_words=True, adds_bos=True),
    "default": Splitter((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
}
"""tokenizer.ggml.pre -> splitter. The regular expressions and Qwen 2's NFC come from the models' own tokenizer.json, which
llama.cpp cites. `default` follows llama.cpp."""


ENDS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>")
"""Tokens of the supported families that llama.cpp always treats as ends of an answer."""


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer that can be written as tokenizer.json."""

    splitter: Splitter | None
    """Splitter of a byte-level BPE (`tokenizer.ggml.model=gpt2`); None for SentencePiece's BPE (`llama`)."""
    tokens: tuple[str, ...]
    types: tuple[int, ...]
    merges: tuple[tuple[str, str], ...]
    """Merges in descending priority."""
    bos: int | None
    eos: int
    ends: tuple[int, ...]
    """Tokens that end an answer, starting with eos."""
    pad: int | None
    unknown: int | None
    add_bos: bool
    add_eos: bool
    space_prefix: bool
    """Whether SentencePiece adds a space before a text."""
    chat_template: str | None
    """Untrusted Jinja template, which only transformers' sandbox renders."""


def read_vocabulary(header: Header) -> Vocabulary:
    """Return the tokenizer of a GGUF. Raises UserError if it could not be reproduced correctly."""
    kind = header.metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise header.error(f"tokenizer.ggml.model={kind} is not supported; use a model with a tokenizer of kind gpt2 or llama")
    tokens = tuple(_array(header, "tokenizer.ggml.tokens", str))
    if not tokens or "" in tokens or len(set(tokens)) != len(tokens):
        raise header.error("tokenizer.ggml.tokens must be different, non-empty texts; convert the model again")
    types = tuple(_array(header, "tokenizer.ggml.token_type", int))
    if len(types) != len(tokens) or not set(types) <= set(range(NORMAL, BYTE + 1)):
        raise header.error(f"tokenizer.ggml.token_type must be {len(tokens)} numbers from 1 to 6; convert the model again")
    splitter, merges = _byte_level(header, tokens) if kind == "gpt2" else (None, _merges_by_score(header, tokens, types))
    sentencepiece = splitter is None
    bos = _token_id(header, "bos", len(tokens), 1 if sentencepiece else None)
    eos = _token_id(header, "eos", len(tokens), 2 if sentencepiece else None)
    if eos is None:
        raise header.error("tokenizer.ggml.eos_token_id is missing; convert the model again")
    add_bos = _flag(header, "add_bos_token", splitter.adds_bos if splitter else True)
    if add_bos and bos is None:
        raise header.error("texts begin with BOS, but tokenizer.ggml.bos_token_id is missing; convert the model again")
    template = header.metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise header.error("tokenizer.chat_template must be a text; convert the model again")
    return Vocabulary(
        splitter=splitter,
        tokens=tokens,
        types=types,
        merges=merges,
        bos=bos,
        eos=eos,
        ends=_ends(header, eos, tokens),
        pad=_token_id(header, "padding", len(tokens), None),
        unknown=_token_id(header, "unknown", len(tokens), 0 if sentencepiece else None),
        add_bos=add_bos,
        add_eos=_flag(header, "add_eos_token", False),
        space_prefix=_flag(header, "add_space_prefix", sentencepiece),
        chat_template=template,
    )


def _byte_level(header: Header, tokens: tuple[str, ...]) -> tuple[Splitter, tuple[tuple[str, str], ...]]:
    pre = header.metadata.get("tokenizer.ggml.pre")
    if not isinstance(pre, str) or pre not in SPLITTERS:
        raise header.error(
            f"tokenizer.ggml.pre={pre}: kvgate does not know how this tokenizer splits text; use a model with one of "
            f"{', '.join(SPLITTERS)}, or its Hugging Face checkpoint"
        )
    vocabulary = set(tokens)
    merges = []
    for merge in _array(header, "tokenizer.ggml.merges", str):
        left, _, right = merge.partition(" ")
        if not {left, right, left + right} <= vocabulary:
            raise header.error(
                f"tokenizer.ggml.merges: {merge!r} is not a merge of two tokens to a token; convert the model again"
            )
        merges.append((left, right))
    return SPLITTERS[pre], tuple(merges)


def _merges_by_score(header: Header, tokens: tuple[str, ...], types: tuple[int, ...]) -> tuple[tuple[str, str], ...]:
    """Return the merges of SentencePiece's BPE, which merges the adjacent pieces whose concatenation has the highest score."""
    if _flag(header, "remove_extra_whitespaces", False) or header.metadata.get("tokenizer.ggml.precompiled_charsmap"):
        raise header.error("its SentencePiece tokenizer normalizes text before splitting it; use the Hugging Face checkpoint")
    scores = _array(header, "tokenizer.ggml.scores", float)
    if len(scores) != len(tokens) or not all(map(isfinite, scores)):
        raise header.error(f"tokenizer.ggml.scores must be {len(tokens)} finite numbers; convert the model again")
    pieces = {token: score for token, kind, score in zip(tokens, types, scores, strict=True) if kind == NORMAL}
    longer = [token for token in pieces if len(token) > 1]
    if len({pieces[token] for token in longer}) != len(longer):
        raise header.error("two tokens have equal tokenizer.ggml.scores; use the Hugging Face checkpoint")
    merges = []
    for token in sorted(longer, key=lambda token: -pieces[token]):
        splits = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        merges += [(left, right) for left, right in splits if left in pieces and right in pieces]
    return tuple(merges)


def _array(header: Header, key: str, kind: type) -> list[Any]:
    values = header.metadata.get(key)
    if not isinstance(values, list) or not all(type(value) is kind for value in values):
        raise header.error(f"{key} is missing, or has values of a wrong type; convert the model again")
    return values


def _ends(header: Header, eos: int, tokens: tuple[str, ...]) -> tuple[int, ...]:
    """Return the tokens that end an answer in llama.cpp: the tokens that the file names, and the tokens of ENDS."""
    header_ids = (_token_id(header, name, len(tokens), None) for name in ("eot", "eom"))
    text_ids = (i for i, token in enumerate(tokens) if token in ENDS)
    return tuple(dict.fromkeys([eos, *(token for token in header_ids if token is not None), *text_ids]))


def _token_id(header: Header, name: str, tokens: int, default: int | None) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    value = header.metadata.get(key, default)
    if value is not None and (type(value) is not int or not 0 <= value < tokens):
        raise header.error(f"{key}={value} is outside its {tokens} tokens; convert the model again")
    return value


def _flag(header: Header, name: str, default: bool) -> bool:
    value = header.metadata.get(f"tokenizer.ggml.{name}", default)
    if type(value) is not bool:
        raise header.error(f"tokenizer.ggml.{name} must be true or false; convert the model again")
    return value
