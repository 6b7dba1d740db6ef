"""Folders of a user's own, outside of work directories, for code that is made once on a machine and loaded from there again."""

import os
import stat
from pathlib import Path


class ForeignFolder(Exception):
    """A folder that somebody else could have written to."""


def own_cache(name: str) -> Path:
    """Return `kvgate/NAME` in $XDG_CACHE_HOME or ~/.cache; create it for this user alone.

    Raises ForeignFolder where it is somebody else's, or others may write to it; OSError where it cannot be created.
    """
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    home = given if given.is_absolute() else Path.home() / ".cache"  # a relative one counts as none, says its specification
    folder = home / "kvgate" / name
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise ForeignFolder(f"{folder}: code is loaded from there, so that it must be a folder of yours with mode 0700")
    return folder
