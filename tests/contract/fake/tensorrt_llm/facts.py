"""The recorded facts that determine the fake's behaviour. The tests check kvgate's output against the same facts."""

import argparse
import json
import math
import os
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[2] / "facts"
ENGINE: dict[str, Any] = json.loads((FOLDER / "engine-1.2.1.json").read_text(encoding="utf-8"))
PYTORCH: dict[str, Any] = json.loads((FOLDER / "pytorch-1.3.json").read_text(encoding="utf-8"))
MODE = os.environ.get("FAKE_MODE", "sound")
"""Selects the misbehaviour of the fake."""


def only(allowed: Any, arguments: dict[str, Any], subject: str) -> None:
    """Raise TypeError for an argument that the real function does not have."""
    unknown = sorted(set(arguments) - set(allowed))
    if unknown:
        raise TypeError(f"{subject}: unexpected arguments {unknown}")


def parse(argv: list[str]) -> dict[str, Any]:
    """Parse trtllm-build's flags. Exits on a flag or value that is not recorded."""
    parser = argparse.ArgumentParser("trtllm-build", allow_abbrev=False)
    for name, flag in ENGINE["flags"].items():
        if flag["kind"] == "flag":
            parser.add_argument(f"--{name}", action="store_true")
        else:
            choices = ["enable", "disable"] if flag["kind"] == "switch" else flag.get("choices")
            kind = int if flag["kind"] == "int" else str
            parser.add_argument(f"--{name}", type=kind, default=flag.get("default"), choices=choices)
    return vars(parser.parse_args(argv))


def rewrite(state: dict[str, Any]) -> None:
    """Apply build()'s silent changes and errors, by the recorded rules. `state`: settings, algorithms, SM."""

    def number(operand: Any) -> Any:
        return math.prod(state[name] for name in operand) if isinstance(operand, list) else operand

    tests = {
        "in": lambda value, operand: value in operand,
        "not in": lambda value, operand: value not in operand,
        "above": lambda value, operand: value > number(operand),
        "below": lambda value, operand: value < number(operand),
    }
    for rule in ENGINE["rewrites"]:
        if all(tests[test](state[key], operand) for key, test, operand in rule["if"]):
            if "raises" in rule:
                raise RuntimeError(f"not supported: {rule['when']}")
            state.update({key: number(value) for key, value in rule["then"].items()})
