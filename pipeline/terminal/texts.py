"""Texts as people see them: relative paths, commands as their shell takes them."""

import os
import re
import shlex
import shutil
import sys
from pathlib import Path


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
