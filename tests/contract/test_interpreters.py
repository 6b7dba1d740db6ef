"""Requirements on every library that runs in its own interpreter, tested with our workers on fakes.

The fakes accept only the recorded arguments.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.engines.interpreters import make_bundle, make_exports, make_interpreter, open_engine
from helpers.policies.shipped import conf
from helpers.refusals import refused

from stages.core.errors import MissingRequirement, UserError
from stages.engines.interpreter.process import Program, inspect_interpreter
from stages.engines.interpreter.requests import RequestEngine
from stages.engines.sglang.backend import PROGRAM as SGLANG
from stages.engines.trtllm.backend import PROGRAM as TRTLLM
from stages.evaluate.decoding.system import measure_system
from stages.workloads.config import LoadConfig

TOKENS = [7, 300, 12, 44, 1001, 5, 5, 620, 9, 13, 700]
FIRST = 4
VOCABULARY = 1344


def trtllm_bundle(target: str, checkpoint: Path, out: Path, kv: str, python: str) -> Path:
    return make_bundle("trtllm", make_exports(checkpoint, out.with_name("quantized"), kv), out, kv, python, target=target)


@dataclass(frozen=True)
class ExternalLibrary:
    program: Program
    build: Callable[[Path, Path, str, str], Path]
    release: str
    limit: str
    """Name of the option that limits a sequence's tokens."""
    hints: tuple[str, ...]
    """Texts of the hint on how to install the library."""
    broken: str
    """Reason why a broken installation cannot be imported."""
    kv: str = "fp8"


LIBRARIES = {
    "trtllm engine": ExternalLibrary(
        TRTLLM, partial(trtllm_bundle, "engine"), "1.2.1", "max_seq_len",
        ("nvcr.io/nvidia/tensorrt-llm/release:1.2.1", "https://pypi.nvidia.com", "Python 3.10 or 3.12", "==1.2.1"),
        "libth_common.so",
    ),
    "trtllm pytorch": ExternalLibrary(
        TRTLLM, partial(trtllm_bundle, "pytorch"), "1.3.0rc20", "max_seq_len", (), "libth_common.so"
    ),
    "sglang": ExternalLibrary(
        SGLANG, partial(make_bundle, "sglang"), "0.5.23", "context_length", ("pip install sglang==0.5.23",), "libcudart",
        kv="fp8_uncalibrated",
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=LIBRARIES)
def library(request: pytest.FixtureRequest) -> ExternalLibrary:
    return LIBRARIES[request.param]


@pytest.fixture(scope="module")
def python(library: ExternalLibrary, tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_interpreter(tmp_path_factory.mktemp("interpreter") / "bin", release=library.release)


@pytest.fixture(scope="module")
def bundle(library: ExternalLibrary, python: str, tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return library.build(tiny_checkpoint, tmp_path_factory.mktemp("built") / "bundle", library.kv, python)


@pytest.fixture(scope="module")
def engine(bundle: Path, python: str) -> Iterator[RequestEngine[Any, Any]]:
    opened = open_engine(bundle, python)
    yield opened
    opened.close()


def test_requests_steps_and_answers_give_the_same_rows(engine: RequestEngine[Any, Any]) -> None:
    rows = engine.forced(TOKENS, FIRST)
    assert rows.shape == (len(TOKENS) - FIRST, VOCABULARY)
    assert np.isfinite(rows).all(), "the rows are read before the worker sets forced logits to -inf"
    reversed_tokens = [*TOKENS[:FIRST], *TOKENS[:FIRST:-1]]
    together = engine.forced_together([(TOKENS, FIRST), (reversed_tokens, FIRST), (TOKENS[2:], 3)])
    np.testing.assert_array_equal(together[0], rows)
    handles, first = engine.prefill([TOKENS[:FIRST], reversed_tokens[:FIRST]])
    assert first.shape == (2, VOCABULARY)
    for step, fed in enumerate(zip(TOKENS[FIRST:], reversed_tokens[FIRST:], strict=False)):
        np.testing.assert_array_equal(engine.decode(handles, fed), [together[0][step], together[1][step]])
    assert engine.memory().live_tokens == len(TOKENS) + len(reversed_tokens) - 1
    engine.release(handles)
    assert engine.memory().pool_bytes == 0
    handles, none = engine.prefill([])
    assert (handles, none.shape) == ([], (0, VOCABULARY))
    (generated,) = engine.generate([TOKENS], 5, ())
    assert engine.forced([*TOKENS, *generated], len(TOKENS)).argmax(1).tolist()[:-1] == generated[1:], (
        "unchanged by the forcing"
    )


def test_must_fail_control_corrupts_the_cache_and_can_be_undone(engine: RequestEngine[Any, Any]) -> None:
    before = engine.forced(TOKENS, FIRST)
    engine.corrupt_key_scale(0.1)
    assert np.abs(engine.forced(TOKENS, FIRST) - before).max() > 0.01
    engine.corrupt_key_scale(10.0)
    np.testing.assert_allclose(engine.forced(TOKENS, FIRST), before, atol=1e-2)
    for factor in (49.0, 1 / 49.0):  # their product is rounded to a number below 1
        engine.corrupt_key_scale(factor)
    assert engine._fault == 1.0, "the sound checkpoint is loaded again"


def test_times_come_from_the_library(engine: RequestEngine[Any, Any]) -> None:
    load = LoadConfig.model_validate({**conf("", "workloads_base")["load"], "batch": 2, "context_tokens": 70, "new_tokens": 6})
    system = measure_system(engine, load)
    assert system.time_to_first_token_ms > 0
    assert system.kib_per_token_allocated == system.kib_per_token


def test_a_prompt_that_is_too_long_is_refused_before_any_work(library: ExternalLibrary, bundle: Path, python: str) -> None:
    engine = open_engine(bundle, python)
    with pytest.raises(UserError, match=rf"backend\.{library.limit}=512: a prompt of 400 tokens with 113 more does not fit"):
        engine.forced([1] * 512, 400)
    assert engine._worker is None
    handles, _ = engine.prefill([[1] * 20, [1] * 500])
    for _ in range(11):
        engine.decode(handles, [2, 2])
    with pytest.raises(UserError, match="does not fit"):
        engine.decode(handles, [2, 2])
    assert engine.memory().live_tokens == 20 + 500 + 2 * 11, "a refused batch stores no token"
    engine.close()


def test_a_bundle_of_another_release_is_refused_with_both(library: ExternalLibrary, bundle: Path, tmp_path: Path) -> None:
    newer = make_interpreter(tmp_path / "bin", release="99.1.0")
    built = library.release.replace(".", r"\.")
    with pytest.raises(MissingRequirement, match=rf"{library.program.library} {built}.* 99\.1\.0"):
        open_engine(bundle, newer)
    assert f"{library.program.library} 99.1.0 was not checked" in str(
        inspect_interpreter(library.program, newer).release_warning
    )
    assert (
        inspect_interpreter(library.program, make_interpreter(tmp_path / "same", release=library.release)).release_warning
        is None
    )


def test_a_missing_requirement_names_its_fix_in_one_line(library: ExternalLibrary, tmp_path: Path) -> None:
    broken = make_interpreter(tmp_path / "bin", mode="broken install")
    name = library.program.library
    for python, message in (
        (None, f"backend.python=null: backend={library.program.backend} needs a Python that has {name}"),
        ("/nowhere/python", "backend.python=/nowhere/python: there is no such program"),
        (broken, f"backend.python={broken}: {name} cannot be used there (ImportError: {library.broken}"),
    ):
        with refused(MissingRequirement, message, *library.hints):
            inspect_interpreter(library.program, python)
