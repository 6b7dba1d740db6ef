"""The chain of artifacts: what it needs is named when it is missing."""

import sys
from pathlib import Path
from typing import Any, get_args

import pytest

from pipeline import store as store_module
from pipeline.backends import BackendConfig
from pipeline.chain import BACKENDS, Chain, entry
from pipeline.digest import reachable_modules, tree_files
from pipeline.errors import MissingRequirement, exit_code
from pipeline.store import Recipe, Store


def test_a_library_that_is_not_installed_is_named_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "stages.plots", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)
    with pytest.raises(MissingRequirement, match=r"stages\.plots needs matplotlib, .* pip install matplotlib") as caught:
        entry("stages.plots", "kl_by_context")
    assert exit_code(caught.value) == 4


def test_a_module_of_ours_that_is_missing_is_a_defect() -> None:
    with pytest.raises(ModuleNotFoundError):
        entry("stages.nothing", "at_all")


def test_an_artifact_is_verified_once_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[Path] = []

    def count(target: Path) -> dict[str, str]:
        hashed.append(target)
        return tree_files(target)

    recipe = Recipe("demo", ("pipeline.kv",), {}, {})
    store = Store(tmp_path)
    store.get(recipe, lambda _: None)
    monkeypatch.setattr(store_module, "tree_files", count)
    config: Any = None  # `_get` does not look at it
    chain = Chain(config, store)
    first = chain._get(recipe, lambda *_: None)
    assert chain._get(recipe, lambda *_: None) is first
    assert len(hashed) == 1
    assert len(chain.done) == 1


def test_every_backend_of_the_configuration_has_its_row_in_the_table() -> None:
    records = get_args(get_args(BackendConfig)[0])
    assert set(BACKENDS) == {name for record in records for name in get_args(record.model_fields["name"].annotation)}
    for backend in BACKENDS.values():
        assert callable(entry(f"{backend.package}.build", "build_bundle"))
        assert callable(entry(f"{backend.package}.engine", "load_engine"))


def test_the_oracle_shares_no_arithmetic_with_the_onnx_engine() -> None:
    assert not [name for name in reachable_modules("stages.oracle.engine") if name.startswith("stages.onnx")]
