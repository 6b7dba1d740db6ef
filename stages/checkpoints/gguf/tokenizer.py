"""Writes a GGUF's tokenizer as tokenizer.json and tokenizer_config.json."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors  # type: ignore[import-untyped]
from tokenizers.models import BPE  # type: ignore[import-untyped]

from stages.checkpoints.gguf.vocabulary import CONTROL, UNKNOWN, USER_DEFINED, Splitter, Vocabulary

BLANK = "▁"
"""Character that SentencePiece uses for a space."""


def write_tokenizer(vocabulary: Vocabulary, max_length: int, out: Path) -> None:
    """Write the tokenizer's files to the checkpoint `out`. `max_length`: the model's maximum sequence length in tokens."""
    splitter, tokens = vocabulary.splitter, vocabulary.tokens
    tokenizer = _sentencepiece(vocabulary) if splitter is None else _byte_level(vocabulary, splitter)
    tokenizer.add_tokens([_added_token(vocabulary, i) for i, kind in enumerate(vocabulary.types) if kind == USER_DEFINED])
    special = [i for i, kind in enumerate(vocabulary.types) if kind in (CONTROL, UNKNOWN)]
    tokenizer.add_special_tokens([_added_token(vocabulary, i) for i in special])
    begin = vocabulary.bos if vocabulary.add_bos else None
    end = vocabulary.eos if vocabulary.add_eos else None
    enclosing = [(tokens[i], i) for i in (begin, end) if i is not None]
    if enclosing:
        first, last = ([tokens[i]] if i is not None else [] for i in (begin, end))
        single, special_tokens = [*first, "$A", *last], list(dict(enclosing).items())
        tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=special_tokens)
    else:
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.save(str(out / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    ends = {"bos": vocabulary.bos, "eos": vocabulary.eos, "pad": vocabulary.pad, "unk": vocabulary.unknown}
    config |= {f"{name}_token": tokens[i] for name, i in ends.items() if i is not None}
    if vocabulary.chat_template is not None:
        config["chat_template"] = vocabulary.chat_template
    text = json.dumps(config, indent=1, ensure_ascii=False)
    (out / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def _added_token(vocabulary: Vocabulary, token_id: int) -> AddedToken:
    special = vocabulary.types[token_id] != USER_DEFINED
    return AddedToken(vocabulary.tokens[token_id], normalized=False, special=special)


def _byte_level(vocabulary: Vocabulary, splitter: Splitter) -> Tokenizer:
    """Return a byte-level BPE tokenizer; its vocabulary writes bytes as printable characters."""
    vocab = {token: i for i, token in enumerate(vocabulary.tokens)}
    tokenizer = Tokenizer(BPE(vocab, list(vocabulary.merges), ignore_merges=splitter.whole_words))
    if splitter.nfc:
        tokenizer.normalizer = normalizers.NFC()
    splits: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in splitter.patterns]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(vocabulary: Vocabulary) -> Tokenizer:
    """Return a BPE tokenizer over characters that falls back to bytes for characters without a token."""
    vocab = {token: i for i, token in enumerate(vocabulary.tokens)}
    unknown = vocabulary.tokens[vocabulary.unknown] if vocabulary.unknown is not None else None
    tokenizer = Tokenizer(BPE(vocab, list(vocabulary.merges), unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = [normalizers.Prepend(BLANK)] if vocabulary.space_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", BLANK)])
    strip = [decoders.Strip(" ", 1, 0)] if vocabulary.space_prefix else []
    tokenizer.decoder = decoders.Sequence([decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return tokenizer
