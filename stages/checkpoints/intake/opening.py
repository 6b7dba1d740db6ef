"""Checks a checkpoint's tokenizer, chat template and weights before any work starts."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from safetensors import safe_open

from stages.checkpoints.description import CheckpointInfo
from stages.checkpoints.files import refusal
from stages.checkpoints.loading import load_tokenizer
from stages.core.errors import MACHINE_ERRORS, UserError, refused_variables, short
from stages.core.redaction import printable
from stages.core.streams import discard_output
from stages.core.threads import in_threads

TEXTS = ("Hello", "9 of 10", "  def f(x):\n\treturn x\n\n", "Zoë naïvely paid 12.50 €, didn't she?", "漢字 и кириллица 🙂")
MAX_ADDED_TOKENS = 1024
"""Maximum number of added tokens that are tried, each in a separate text."""

NUMBERS = 1 << 20
"""Numbers per step of the check for finite weights, to save memory."""


def check_loadable(info: CheckpointInfo) -> None:
    """Raise UserError for files on which a later stage would fail. The result is not cached, because files may change.

    Checks that the tokenizer is consistent, the chat template accepts a greeting within its limits, and the weights of a
    directory are finite. The conversion of a GGUF, which is the first step, checks its weights.
    """
    with tokenizer_directory(info) as directory:
        _check_tokenizer(info, directory)
    if info.path.is_dir():
        check_finite(info)  # last, since it reads all weights


def check_finite(info: CheckpointInfo) -> None:
    """Raise UserError for a weight that is NaN or infinite as float32. The headers of the files must have passed the checks."""

    def check(file: str) -> None:
        with safe_open(info.path / file, "pt") as content:
            for name in content.keys():  # noqa: SIM118  (not a mapping)
                part = content.get_slice(name)
                shape = part.get_shape()
                rows = max(1, NUMBERS // max(1, prod(shape[1:])))
                pieces = (part[at : at + rows] for at in range(0, shape[0], rows)) if shape else [content.get_tensor(name)]
                for numbers in (piece.float() for piece in pieces):
                    # A finite sum proves that all numbers are finite, ten times as fast as a look at each number.
                    if not numbers.sum().isfinite() and not numbers.isfinite().all():
                        problem = "holds NaN, infinity or a number beyond float32; give finite weights"
                        raise refusal(info.path, f"{file}: {printable(name[:200])} {problem}")

    in_threads(check, info.weight_files)


@contextmanager
def tokenizer_directory(info: CheckpointInfo) -> Iterator[Path]:
    """Yield a directory with the tokenizer's files: the checkpoint, or for a GGUF a temporary directory."""
    if info.path.is_dir():
        yield info.path
        return
    from stages.checkpoints.gguf.model import inspect_gguf
    from stages.checkpoints.gguf.tokenizer import write_tokenizer

    with tempfile.TemporaryDirectory(prefix="kvgate-") as scratch:
        write_tokenizer(inspect_gguf(info.path).vocabulary, info.max_positions, Path(scratch))
        yield Path(scratch)


def _check_tokenizer(info: CheckpointInfo, directory: Path) -> None:
    from stages.workloads.prompts import rendered

    path = info.path
    try:
        with _discard_stderr():
            tokenizer = load_tokenizer(directory)
            first, other = (tokenizer(text, verbose=False)["input_ids"] for text in TEXTS[:2])
            decoded = tokenizer.decode(other, skip_special_tokens=True).strip()
    except (UserError, KeyboardInterrupt, SystemExit, *MACHINE_ERRORS):
        raise
    except BaseException as error:  # tokenizers panics and raises bare exceptions; transformers raises many types
        if refused_variables(error):
            raise
        detail = short(f"{type(error).__name__}: {error}".splitlines()[0], 200)
        fix = "correct tokenizer.json, tokenizer_config.json or chat_template.jinja, or give the checkpoint its own"
        if not (directory / "tokenizer.json").is_file():
            fix = "save tokenizer.json there with tokenizer.save_pretrained"
        raise refusal(path, f"its tokenizer cannot be loaded ({detail}); {fix}") from None
    problem = None
    if not tokenizer.eos_token:
        problem = "has no eos_token; tokenizer_config.json should name it"
    elif first == other:
        problem = "encodes different texts alike"
    elif decoded != TEXTS[1]:
        problem = f"decodes the tokens of {TEXTS[1]!r} as {short(repr(decoded), 40)}"
    if problem is not None:
        raise refusal(path, f"its tokenizer {problem}; give the checkpoint its own tokenizer")
    differing = _differing_text(tokenizer, directory)
    if differing is not None:
        raise refusal(
            path,
            f"transformers and tokenizer.json encode {short(differing)} differently; make tokenizer_config.json "
            "(added_tokens_decoder) agree with tokenizer.json",
        )
    greeting = rendered([partial(_greeting, path, tokenizer)])[0] if tokenizer.chat_template else TEXTS[1]
    largest = max(tokenizer.eos_token_id, *first, *tokenizer(greeting, verbose=False)["input_ids"])
    if largest >= info.vocab_size:
        raise refusal(
            path, f"its tokenizer makes token {largest}, vocab_size is {info.vocab_size}; give the checkpoint its own tokenizer"
        )
    if TEXTS[1] not in greeting:
        raise refusal(path, "its chat_template drops the user's message; give another template")


@contextmanager
def _discard_stderr() -> Iterator[None]:
    """Discard the output of native code on descriptor 2: tokenizers prints a backtrace when it panics."""
    stderr = os.dup(2)
    discard_output(2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)


def _differing_text(tokenizer: Any, directory: Path) -> str | None:
    """Return a text that the loaded tokenizer encodes differently from its tokenizer.json, or None if there is no such text."""
    from tokenizers import Tokenizer  # type: ignore[import-untyped]

    file = directory / "tokenizer.json"
    if not file.is_file():  # the tokenizer consists of vocab.json and merges.txt
        return None
    raw_tokenizer = Tokenizer.from_file(str(file))
    raw_tokenizer.no_truncation()
    raw_tokenizer.no_padding()
    decoders = (raw_tokenizer.get_added_tokens_decoder(), tokenizer.added_tokens_decoder)
    added = list(dict.fromkeys(token.content for decoder in decoders for _, token in sorted(decoder.items())))
    for text in (*TEXTS, *(f"a {token} b{token}" for token in added[:MAX_ADDED_TOKENS])):
        for special in (False, True):
            ids = tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
            if ids != raw_tokenizer.encode(text, add_special_tokens=special).ids:
                return text
    return None


def _greeting(path: Path, tokenizer: Any) -> str:
    from jinja2 import TemplateError

    from stages.workloads.prompts import apply_template

    try:
        return apply_template(tokenizer, [("user", TEXTS[1])])
    except TemplateError as error:
        raise refusal(path, f"its chat_template refuses a greeting ({short(error, 200)}); give another template") from None
