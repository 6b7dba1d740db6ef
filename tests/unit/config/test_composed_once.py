"""The tests' cache of Hydra's work gives the configurations that Hydra itself composes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from pipeline.config.compose import plan

COMMANDS = (
    ["experiment=quick", "kv=fp8,int4_sinks", "gates.attempt=2,3"],
    ["kv=int4_sinks", "kv.sink_tokens=8", "backend=vllm", "backend.max_model_len=8192", "workloads=chat", "tracking=none"],
    ["kv=int4_sinks", "kv.sink_tokens=2", "backend=vllm", "backend.max_model_len=4096", "workloads=chat", "tracking=none"],
)


def compositions() -> list[dict[str, Any]]:
    return [job.model_dump(mode="json") for overrides in COMMANDS for job in plan(overrides, multirun=True).jobs]


def test_cached_configurations_equal_hydras_own() -> None:
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[3])]
    script = "import json; from test_composed_once import compositions; print(json.dumps(compositions()))"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(folders)}
    hydras = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True).stdout
    first, cached = compositions(), compositions()
    assert first == cached == json.loads(hydras)
