"""vLLM's interpreter, and what its worker answers besides what every worker does."""

from pathlib import Path
from typing import Annotated

from pydantic import Field

from pipeline.core.strict import StrictModel
from stages.engines.interpreter import protocol
from stages.engines.interpreter.process import Interpreter, Program
from stages.engines.vllm import worker


class Description(protocol.Description):
    """Answer to `describe`."""

    platform: str
    """cpu, cuda, or what vLLM calls another one."""
    cache_dtypes: Annotated[list[str], Field(min_length=1)]
    """Names of the cache's types that the release knows."""
    refused: dict[str, str]
    """Those of them that this machine cannot hold -> why."""


class LayerScales(StrictModel):
    """The scales that one attention layer reads."""

    layer: str
    key: list[float]
    value: list[float]


class Facts(StrictModel):
    """Answer to `facts`: what a loaded engine uses."""

    scales: list[LayerScales]
    block_tokens: Annotated[int, Field(ge=1)]
    block_bytes: Annotated[int, Field(ge=1)]
    """Of one block in all layers."""
    kernel: str
    """What computes attention: the CPU's instruction set, or the attention backend."""


class Drafted(StrictModel):
    """Answer to `draft`: tokens and passes of each request, and vLLM's own counters."""

    tokens: list[list[int]]
    passes: list[int]
    drafts: int
    draft_tokens: int
    accepted_tokens: int


PROGRAM = Program(
    "vllm",
    "vLLM",
    Path(worker.__file__).with_name("kvgate_vllm_worker.py"),
    "make vllm installs vLLM's CPU build into .venv-vllm: backend.python=.venv-vllm/bin/python; on a GPU machine run kvgate in "
    "the container vllm/vllm-openai:v0.32.0 with backend.python=python3, or give the python of an environment with "
    "pip install vllm==0.32.0",
    {
        # A model is a directory, and nothing but the release itself runs: neither a hub nor an installed plugin is asked.
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_PLUGINS": "",
        "VLLM_LOGGING_LEVEL": "WARNING",
        # The engine in the worker itself, with the runner that takes logits processors.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
    },
    read=("0.32",),
    oldest=(0, 30),
    description=Description,
)
"""Releases before 0.30 lack names that the worker uses."""


def on_cpu(interpreter: Interpreter) -> bool:
    return bool(interpreter.description.platform == "cpu")
