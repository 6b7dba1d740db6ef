"""An engine that was built for another GPU or another release is refused."""

from pathlib import Path

import pytest
from helpers.refusals import refused

from stages.core.errors import MissingRequirement
from stages.engines.bundle import BuiltFor, check_built_for

BUILT = BuiltFor(library="TensorRT", version="10.14.1.48", compute_capabilities=["8.9", "9.0"])


@pytest.mark.parametrize(
    ("machine", "message"),
    [
        ({"version": "10.15.0.1", "compute_capabilities": ["8.9"]}, "TensorRT 10.15.0.1 and SM 8.9"),
        ({"compute_capabilities": []}, "TensorRT 10.14.1.48 and no GPU"),
        ({"library": "TensorRT for RTX", "compute_capabilities": ["8.9"]}, "TensorRT for RTX 10.14.1.48 and SM 8.9"),
    ],
)
def test_an_engine_for_another_gpu_or_version_is_refused(machine: dict[str, object], message: str) -> None:
    built = "engine: this engine was built for TensorRT 10.14.1.48 and SM 8.9, 9.0"
    with refused(MissingRequirement, f"{built}, but this machine has {message}: build it here"):
        check_built_for(Path("engine"), BUILT, BUILT.model_copy(update=machine))
