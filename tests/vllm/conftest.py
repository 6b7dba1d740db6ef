"""Tests on vLLM itself: `make test-vllm` installs it into .venv-vllm. Without it they are skipped; REQUIRE_VLLM=1: they fail."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def vllm_python() -> str:
    """vLLM's interpreter."""
    python = Path(os.environ.get("KVGATE_VLLM_PYTHON", ROOT / ".venv-vllm" / "bin" / "python")).absolute()
    if not python.is_file():
        reason = f"{python} is missing: make vllm installs vLLM there, make test-vllm runs these tests"
        if os.environ.get("REQUIRE_VLLM") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    return str(python)
