"""Facts about the names in vLLM's sources that kvgate relies on, per release, in contract/facts/vllm.json.

To add a release, unpack its source distribution and run this script; it neither imports nor builds vLLM:

    PYTHONPATH=.:tests python -m helpers.engines.vllm_facts vllm-0.33.0/vllm
"""

import ast
import json
import re
import sys
from pathlib import Path
from typing import Any

from helpers.engines.interpreters import config_of
from stages.engines.vllm.backend import engine_args
from stages.engines.vllm.engine import EVALUATION_ARGS

FACTS_FILE = Path(__file__).resolve().parents[2] / "contract" / "facts" / "vllm.json"


def engine_arguments() -> set[str]:
    """Return the engine arguments that kvgate sets: for serving, evaluation and memory pressure."""
    serving = engine_args(config_of("vllm", "python3", kv_cache_gib=1), "auto", ["0"])
    return {"model", *serving, *EVALUATION_ARGS, "num_gpu_blocks_override"}


def facts(source: Path) -> dict[str, Any]:
    """Return the facts of a source tree."""
    return {
        "CacheDType": _literals(source / "config/cache.py", "CacheDType"),
        "EngineArgs": sorted(engine_arguments() & _fields(source / "engine/arg_utils.py", "EngineArgs")),
    }


def _fields(path: Path, name: str) -> set[str]:
    """Return the fields of a dataclass."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            fields = [statement.target for statement in node.body if isinstance(statement, ast.AnnAssign)]
            return {field.id for field in fields if isinstance(field, ast.Name)}
    raise LookupError(name)


def _literals(path: Path, name: str) -> list[str]:
    """Return the values of a Literal type."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == name:
            return [str(constant.value) for constant in ast.walk(node.value) if isinstance(constant, ast.Constant)]
    raise LookupError(name)


def main(source: str) -> None:
    """Add a release's facts to the file."""
    version = re.search(r"-(\d+\.\d+\.\d+)", str(Path(source).resolve()))
    assert version is not None, "name the folder of the unpacked source distribution"
    releases = json.loads(FACTS_FILE.read_text(encoding="utf-8")) | {version[1]: facts(Path(source))}
    FACTS_FILE.write_text(json.dumps(releases, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
