"""Fuzz tests: for any bytes, readers of external files return a value or raise a `Refusal`."""

import contextlib
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from bad_input.makers import CONFIG, TENSORS, checkpoint, safetensors
from pipeline.config.config import MonitorConfig
from pipeline.evidence.identity import read_bundle, read_identity
from pipeline.registry import summary
from pipeline.registry.routing import read_snapshot
from stages.checkpoints.description import inspect_checkpoint
from stages.checkpoints.weights import check_weights
from stages.core.errors import Refusal
from stages.evaluate.inputs.samples import read_jsonl
from stages.quantize.calibration import texts_from_file

FUZZED = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

NUMBERS = st.sampled_from([10**400, -1, 0, 1 << 63])
LEAVES: SearchStrategy[Any] = st.one_of(
    st.none(), st.booleans(), st.integers(), NUMBERS, st.floats(), st.text(st.characters(codec=None), max_size=12)
)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3), max_leaves=8
)
KEYS = ["schema_version", "candidates", "chain", "verdict", "prompt", "messages", "reference", "text", "classes"]


def nested(keys: list[str]) -> SearchStrategy[dict[str, Any]]:
    """Return a strategy for objects with some of the given keys and arbitrary values."""
    return st.dictionaries(st.sampled_from(keys), VALUES, max_size=4)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return checkpoint(tmp_path / "model")


@FUZZED
@example(changes={"architectures": [None], "model_type": None})
@given(changes=nested(list(CONFIG)))
def test_any_config_json_is_read_or_refused(changes: dict[str, Any], model: Path) -> None:
    (model / "config.json").write_text(json.dumps(CONFIG | changes))
    with contextlib.suppress(Refusal):
        check_weights(inspect_checkpoint(model))


@FUZZED
@given(st.none() | st.integers(0, 2**64 - 1), nested(["dtype", "shape", "data_offsets"]), st.integers(0, 200))
def test_any_safetensors_header_is_read_or_refused(model: Path, length: int | None, entry: dict[str, Any], cut: int) -> None:
    path = model / "model.safetensors"
    safetensors(path, TENSORS, header=lambda h: h | {"model.norm.weight": h["model.norm.weight"] | entry})
    content = path.read_bytes()[: None if cut == 0 else -cut]
    path.write_bytes(content if length is None else struct.pack("<Q", length) + content[8:])
    with contextlib.suppress(Refusal):
        check_weights(inspect_checkpoint(model))


MONITOR = MonitorConfig(snapshot=None, min_within_limit=0.9, min_json_validity=0.9, min_canary_accuracy=0.9, max_live_share=0.9)
READERS: dict[str, Callable[[Path], object]] = {
    "summary.json": lambda path: summary.load(path.parent),
    "identity.json": read_identity,
    "bundle.json": lambda path: read_bundle(path.parent),
    "samples.jsonl": lambda path: read_jsonl(path, set()),
    "texts.jsonl": lambda path: texts_from_file(path, 10),
    "snapshot.json": lambda path: read_snapshot(MONITOR.model_copy(update={"snapshot": str(path)})),
}


@pytest.mark.parametrize("name", READERS)
@FUZZED
@given(content=st.binary(max_size=60) | (nested(KEYS) | VALUES).map(lambda value: json.dumps(value).encode()))
def test_any_other_file_is_read_or_refused(name: str, content: bytes, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with contextlib.suppress(Refusal):
        READERS[name](path)
