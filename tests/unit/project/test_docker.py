"""Checks of the Dockerfile that need no Docker engine. docs/start.md#containers lists the manual checks."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.config.compose import plan
from stages.core.redaction import secret_name

ROOT = Path(__file__).resolve().parents[3]
DOCKERFILE = ROOT / "Dockerfile"


def values(word: str) -> list[str]:
    """Return the arguments of all uses of an instruction."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if not line.lstrip().startswith("#")]
    return re.findall(rf"^\s*{word} (.*)$", "\n".join(lines).replace("\\\n", " "), re.MULTILINE)


def test_hadolint_has_nothing_to_say() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    result = subprocess.run([hadolint, DOCKERFILE], check=False, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, ""), result.stdout + result.stderr


def test_no_secret_is_baked_into_an_image() -> None:
    for pair in (pair for rest in [*values("ENV"), *values("ARG")] for pair in rest.split()):
        assert not secret_name(pair.partition("=")[0]), pair


def test_an_image_installs_what_is_locked_by_hash_and_nothing_else() -> None:
    steps = [step.strip() for rest in values("RUN") for step in rest.split("&&")]
    installs = [step for step in steps if re.search(r"\bpip (install|wheel) ", step) and "--target /build/" not in step]
    assert installs
    for step in installs:
        locked = "--require-hashes -r /build/" in step
        given = "torch==" in step or "kvgate-*.whl" in step or step.endswith("--wheel-dir /dist .")
        assert locked or (given and "--no-deps" in step), step


def test_the_preset_interpreter_is_the_default_of_backend_python(monkeypatch: pytest.MonkeyPatch) -> None:
    def python(*overrides: str) -> object:
        return plan(["backend=trtllm", "stage=build", *overrides], multirun=False).jobs[0].model_dump()["backend"]["python"]

    assert python() is None
    monkeypatch.setenv("KVGATE_TRTLLM_PYTHON", "/usr/bin/python3")
    assert "KVGATE_TRTLLM_PYTHON=/usr/bin/python3" in " ".join(values("ENV"))
    assert python() == "/usr/bin/python3"
    assert python("backend.python=/opt/other") == "/opt/other"
