"""The user's own files: samples in `workloads.jsonl`, or texts in `workloads.documents`."""

import re
from pathlib import Path

from stages.core.errors import UserError
from stages.core.strict import read_user_file
from stages.workloads.config import WorkloadsConfig

TEXT_SUFFIXES = (".txt", ".md")
"""Suffixes of the files that are read in a directory of texts."""
WORD = re.compile(r"\S{1,8}\s*")
"""Up to 8 characters of a word, and white space after the word. Some languages put no spaces between words."""
TOKENS_PER_WORD = 4
"""Assumed tokens per ASCII word, a high estimate for prose. Each digit or punctuation mark may be a token of its own, and other
words count as three tokens per character. Texts are refused as too short if they cannot fill a document even at these rates."""


def _most_tokens(word: str) -> int:
    if not word.isascii():
        return 3 * len(word)
    letters = sum(map(str.isalpha, word))
    return max(TOKENS_PER_WORD, min(TOKENS_PER_WORD, letters) + len(word.strip()) - letters)


def user_files(key: str, path: Path) -> list[Path]:
    """Return the user's file, or the text files below the user's directory by path. Raises UserError if there are none."""
    if not path.is_dir():
        return [path]
    files = sorted(file for file in path.rglob("*") if file.suffix.lower() in TEXT_SUFFIXES and file.is_file())
    if not files:
        raise UserError(
            f"{key}={path}: has no text files; give a directory with files that end with {' or '.join(TEXT_SUFFIXES)}"
        )
    return files


def user_content(key: str, path: Path) -> bytes:
    """Return the content of the user's files, joined by empty lines. Raises UserError if a file cannot be read."""
    return b"\n\n".join(read_user_file(key, file) for file in user_files(key, path))


def document_words(config: WorkloadsConfig) -> list[str] | None:
    """Return the words of `workloads.documents`, each followed by its white space; None if no document quotes them.

    Raises UserError if a file cannot be read or is not UTF-8, or if all texts are too short for the longest document.
    """
    if config.documents is None or config.user_path is None or not config.lengths:
        return None
    key = f"workloads.documents={config.user_path}"
    texts = []
    for file in user_files("workloads.documents", config.user_path):
        try:
            texts.append(read_user_file("workloads.documents", file).decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            raise UserError(f"workloads.documents={file}: is not UTF-8 ({error.reason}); give a text in UTF-8") from None
        if "\0" in texts[-1]:  # a binary file, or UTF-16 without its mark
            raise UserError(f"workloads.documents={file}: holds null characters; give a text in UTF-8")
    words = WORD.findall("\n\n".join(texts))
    longest = max(config.lengths)
    min_words = longest // TOKENS_PER_WORD
    if sum(map(_most_tokens, words)) < longest:
        raise UserError(
            f"{key}: {len(words):,} words are too few to fill {longest:,} tokens; give at least {min_words:,} words, or lower "
            "workloads.lengths"
        )
    return words
