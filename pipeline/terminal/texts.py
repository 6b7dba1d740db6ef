"""Texts as people see them: relative paths, commands as their shell takes them, lines that end between words."""

import os
import re
import shlex
import shutil
import sys
import textwrap
from pathlib import Path

from rich.text import Text


def relative(text: str) -> str:
    """Return a text with the paths below the current directory relative to it; in addresses, those of SQLite alone."""
    try:
        here = os.getcwd()
    except OSError:  # it was removed
        return text
    if here == "/":
        return text
    return re.sub(rf"(?:(?<=sqlite:///)|(?<![\w./:~-])){re.escape(here)}/(?=[^\s/])", "", text)


def begun() -> str:
    """Return how a command line begins: with `python`, or with this one's path where a shell finds another one, or none."""
    own, found = Path(sys.executable), shutil.which("python")
    same = found is not None and Path(found).absolute().parent == own.parent
    return f"{'python' if same else shlex.quote(str(own))} -m pipeline"


def between_words(text: Text, width: int) -> list[Text]:
    """Return a text in lines; a word that is too long has a line to itself, which rich would break."""
    starts, end = [], 0
    for part in textwrap.wrap(text.plain, width, break_long_words=False, break_on_hyphens=False, replace_whitespace=False):
        starts.append(text.plain.index(part, end))
        end = starts[-1] + len(part)
    lines = list(text.divide(starts[1:]))
    for line in lines:
        line.rstrip()
    return lines
