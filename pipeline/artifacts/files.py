"""Links to files that several artifacts share."""

import os
import shutil
from pathlib import Path


def link_or_copy(source: Path, target: Path) -> None:
    """Hard link `target` to `source`, so that a file of many GB exists once; copy it where linking fails.

    Only for files that nobody writes to in place, since both names share their bytes. Linking fails between file systems, and
    for files of another user, which the kernel may protect.
    """
    try:
        os.link(source.resolve(), target)  # resolved: Linux would link the symlink itself
    except OSError:
        shutil.copyfile(source, target)
