"""Fixtures used by more than one test module."""

import gc
import os
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from bad_input.forks import RunCase, fork_commands
from helpers.commands.cached_hydra import compose_once
from helpers.stride import STRIDE

if TYPE_CHECKING:
    from helpers.commands.tiny_model import Swept
    from helpers.engines.conformance import Conformity

ROOT = Path(__file__).resolve().parents[1]
INTEGRATION = ROOT / "tests" / "integration"


def pytest_configure(config: pytest.Config) -> None:
    """Prepare a process that runs tests. The process that starts pytest-xdist's workers runs none, and needs less."""
    os.environ.pop("COLUMNS", None)  # xdist sets it. Without it, tables have the width of output without a terminal.
    # A shell's background job ignores Ctrl-C, and so would every process that the tests start.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        return
    import torch

    # Triton decides at its first import whether to interpret kernels. Without a GPU, it must.
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
    # The tests' models are tiny and every core runs a test process: more threads would only wait for each other.
    torch.set_num_threads(1)
    # A search for garbage takes long in processes with many libraries, and finds little.
    gc.set_threshold(100_000)
    # Garbage collection in a fork could destroy inherited objects, such as an ONNX Runtime session, and wait for threads
    # that do not exist in the child.
    os.register_at_fork(after_in_child=gc.freeze)
    compose_once()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip GPU tests on machines without a GPU (REQUIRE_GPU=1 makes them fail instead), and select integration tests.

    `make test-long` sets EVERY_POLICY=1 and runs only those tests of tests/integration that are marked `every`, because
    they have more cases then. `make test` selects every integration test. Naming a file does not change this.
    """
    # Only marks are checked: an item's keywords also contain the names of its folders.
    if STRIDE == 1:
        items[:] = [item for item in items if not item.path.is_relative_to(INTEGRATION) or item.get_closest_marker("every")]
    import torch

    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and os.environ.get("REQUIRE_GPU") != "1" and not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU (REQUIRE_GPU=1 turns this into a failure)"))


@pytest.fixture(scope="module", autouse=True)
def _freeze_shared_objects() -> None:
    """Exempt imported modules and shared engines from garbage collection, which would scan them repeatedly."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def new_memory_is_nan() -> Iterator[None]:
    """Fill new tensors with NaN, so that a kernel must write all of its output."""
    import torch

    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture(scope="session")
def quick_stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let new SQLite stores begin as a copy of one: MLflow's migrations of an empty database take seconds."""
    import sqlalchemy
    from helpers.shared import once
    from mlflow.store.db import utils

    initialize: Any = utils._initialize_tables
    is_empty: Any = utils._is_empty_database

    def migrate(folder: Path) -> None:
        folder.mkdir()
        engine = sqlalchemy.create_engine(f"sqlite:///{folder / 'mlflow.db'}")
        initialize(engine)
        engine.dispose()

    template = once(tmp_path_factory, "migrated", migrate) / "mlflow.db"

    def copy(engine: Any) -> None:
        if engine.dialect.name != "sqlite" or not is_empty(engine):
            initialize(engine)
            return
        with closing(sqlite3.connect(template)) as source, closing(sqlite3.connect(engine.url.database)) as target:
            source.backup(target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "_initialize_tables", copy)
        yield


@pytest.fixture
def no_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the charts of report.html, which a new process draws in a second."""
    monkeypatch.setattr("stages.report.page.draw_charts", lambda _: {})


@pytest.fixture(scope="session")
def tiny_checkpoint() -> Path:
    """The trained checkpoint that ships with kvgate."""
    return ROOT / "stages" / "tiny" / "checkpoint"


@pytest.fixture(scope="session")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The decoder skeleton of the random Llama in `helpers.engines.random_llama`, which computes in float32."""
    from helpers.engines.random_llama import shared_decoder

    return shared_decoder(tmp_path_factory, "float32")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The random Llama in `helpers.engines.random_llama`."""
    from helpers.engines.random_llama import load_model, shared_checkpoint

    return load_model(shared_checkpoint(tmp_path_factory))


@pytest.fixture(scope="session")
def int8(decoder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of int8 with the random Llama."""
    from helpers.engines.random_llama import BY_NAME, make_bundle

    return make_bundle(decoder, tmp_path_factory.mktemp("int8") / "bundle", BY_NAME["int8"])


@pytest.fixture(scope="session")
def bench(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> "Conformity":
    """Engines of the trained tiny model with their reference engines."""
    from helpers.engines.conformance import Conformity

    return Conformity(tiny_checkpoint, tmp_path_factory)


@pytest.fixture(scope="session")
def evidence(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Evidence of a judged engine, in its store. Tests may only change copies."""
    from helpers.registry.judged_engine import judged_engine

    return judged_engine(tmp_path_factory.mktemp("store"))


@pytest.fixture
def copy(evidence: Path, tmp_path: Path) -> Path:
    """An engine, its baseline and their evidence, copied out of the store."""
    from helpers.registry.judged_engine import exported

    return exported(evidence, tmp_path / "copy", "engine", "baseline")


def _own_python(library: str) -> str:
    """Return the path of a library's interpreter. Without it, tests are skipped, or fail if REQUIRE_LIBRARY=1."""
    named = os.environ.get(f"KVGATE_{library.upper()}_PYTHON", ROOT / f".venv-{library}" / "bin" / "python")
    python = Path(named).absolute()
    if not python.is_file():
        reason = f"{python} is missing: make {library} installs it there, make test-{library} runs these tests"
        if os.environ.get(f"REQUIRE_{library.upper()}") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    return str(python)


@pytest.fixture(scope="session")
def vllm_python() -> str:
    return _own_python("vllm")


@pytest.fixture(scope="session")
def llamacpp_python() -> str:
    return _own_python("llamacpp")


@pytest.fixture(scope="session")
def run_case() -> Iterator[RunCase]:
    """A function that runs a command line in a fork of a process without slow libraries."""
    with fork_commands() as function:
        yield function


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path, quick_stores: None) -> "Swept":  # noqa: ARG001
    """The work directory after a sweep over a sound and a broken cache, and the finished process."""
    from helpers.commands.tiny_model import sweep
    from helpers.engines.random_llama import tiny_decoder

    return sweep(tmp_path_factory.mktemp("main") / "work", tiny_decoder(tmp_path_factory, tiny_checkpoint))
