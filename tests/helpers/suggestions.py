"""Overrides that messages suggest: found in texts, filled where they have placeholders, and composed."""

import re
from collections.abc import Iterator
from functools import cache
from typing import Any, get_args

from pipeline.config import CONF
from pipeline.config.compose import plan
from pipeline.config.config import Config, Stage
from pipeline.core.errors import UserError

BACKENDS = sorted(path.stem for path in (CONF / "backend").glob("*.yaml"))

OVERRIDE = re.compile(r"(?<![\w./$-])(?P<key>\+?[a-z_]+(?:\.\w+)*)=(?P<value>'[^']*'|\[[^\]]*\]|\{[^}]*\}|[^\s,;:)(\"'\]]+)")
CORRECTED = re.compile(r"(?P<key>[\w.]+)=(?P<wrong>\S+): no such option, did you mean (?P<right>[^\s?]+)\?")
RENAMED = re.compile(r"(?P<key>[\w.]+): unknown key, did you mean (?P<right>\w+)\?")


def keys(annotation: Any = Config, prefix: str = "") -> Iterator[str]:
    """Yield every key of the configuration, of all backends."""
    for part in get_args(annotation) or (annotation,):
        if get_args(part):
            yield from keys(part, prefix)
        elif hasattr(part, "model_fields"):
            for name, field in part.model_fields.items():
                yield f"{prefix}{name}"
                yield from keys(field.annotation, f"{prefix}{name}.")


KEYS = frozenset(keys())
GROUPS = frozenset(path.name for path in CONF.iterdir() if path.is_dir())
ROOTS = frozenset(key.partition(".")[0] for key in KEYS)

PLACES = {
    "promote.name": "fp8", "promote.sweep": "20261123-1", "promote.policy": "policy.yaml", "bundle": "engine", "kv": "fp8",
    "routing.file": "routes.yaml", "routing.rollback": "chat", "monitor.snapshot": "snapshot.json", "workdir": "work",
    "signing.key": "key.pem", "signing.trusted": "[key.pem]",
    "model.path": "model", "workloads.jsonl": "samples.jsonl", "calibration.jsonl": "texts.jsonl",
    "backend.python": "python3", "backend.model": "name", "backend.url": "http://127.0.0.1:8000/v1",
    "backend.api_key_env": "SERVER_KEY", "backend.baseline_url": "http://127.0.0.1:8001/v1", "backend.dtype": "float32",
    "backend.canary_url": "http://127.0.0.1:8002/v1", "capacity.weights_gib": "1.5", "weights": "fp8", "stage": "evaluate",
    "backend": "onnxruntime", "tracking.experiment": "mine", "backend.max_model_len": "2048", "backend.context_length": "2048",
    "gates.allow_scale_changes": "merged", "backend.compute_capabilities": "[89,120]",
}  # fmt: skip
"""What stands for a value that only a run knows."""

REQUIRED = {
    "verify": ["bundle=engine"], "route": ["routing.file=routes.yaml"], "monitor": ["monitor.snapshot=snapshot.json"],
    "promote": [],
}  # fmt: skip


def suggested(message: str) -> Iterator[str]:
    """Yield the overrides that a message suggests: not what was given, with which its lines begin."""
    for line in message.splitlines():
        text = line.removeprefix("pipeline: error: ")
        given, colon, rest = text.partition(": ")
        for found in OVERRIDE.finditer(rest if colon and OVERRIDE.match(given) else text):
            key = found["key"].lstrip("+")
            echo = not colon and found.start() == 0
            if not echo and key.partition(".")[0] in ROOTS | GROUPS and ("." in key or key in KEYS | GROUPS):
                yield found[0].rstrip(".?")
        for found in CORRECTED.finditer(text):
            yield f"{found['key']}={found['right']}"


def renamed(message: str) -> list[str]:
    """Return the keys that a message gives for misspelt ones."""
    return [f"{found['key'].rpartition('.')[0]}.{found['right']}".lstrip(".") for found in RENAMED.finditer(message)]


def filled(override: str) -> str:
    """Return an override with something in place of what only a run knows: FILE, NAME."""
    key, _, value = override.partition("=")
    name = key.lstrip("+")
    if not re.fullmatch(r"'?[A-Z]+'?|\{\w+(:\w+)?\}", value):
        return override
    if name in PLACES and not value.startswith("["):
        return f"{key}={PLACES[name]}"
    if value.startswith("["):
        return f"{key}=[{PLACES.get(name, 'fp8')}]"
    return f"{key}={_default(name)}"


def _default(key: str) -> object:
    """The value that a key has unless it is given, in the first backend that has it."""
    for backend in BACKENDS if key.startswith("backend.") else ["onnxruntime"]:
        node: Any = _composed(backend)
        for part in key.split("."):
            node = getattr(node, part, None)
        if node is not None:
            return node
    return 1


@cache
def _composed(backend: str) -> Config:
    return plan([f"backend={backend}", *_needed(backend)], multirun=False).jobs[0]


def _needed(backend: str) -> list[str]:
    return ["backend.url=http://127.0.0.1:8000/v1", "backend.model=name"] if backend == "openai" else []


@cache
def problems(override: str) -> list[str]:
    """Return why no stage and backend accepts an override; nothing where one does."""
    key = override.partition("=")[0]
    refusals: list[str] = []
    for context in _contexts(key, refusals):
        try:
            plan([*(one for one in context if key in GROUPS or one.partition("=")[0] != key), override], multirun=False)
        except UserError as error:
            refusals.append(str(error))
        else:
            return []
    return list(dict.fromkeys(refusals))


def _contexts(key: str, refusals: list[str]) -> Iterator[list[str]]:
    """Yield what may stand beside an override: nothing, what its refusal asks for, then every backend or stage."""
    yield []
    for stage in re.findall(r"stage=(\w+)", refusals[-1]):
        yield [f"stage={stage}", *REQUIRED.get(stage, [])]
        yield [f"stage={stage}"]
    if key.lstrip("+").startswith("backend"):
        for backend in BACKENDS:
            yield [f"backend={backend}", *_needed(backend)]
        yield ["backend=trtllm", "backend.target=pytorch"]
    elif key == "workloads.jsonl":
        yield ["workloads=jsonl"]
    elif key == "signing.trusted":
        yield ["stage=verify", *REQUIRED["verify"]]
    elif key == "workloads":
        yield ["workloads.jsonl=samples.jsonl"]
    elif key.startswith("workloads.bfcl."):
        yield ["workloads=bfcl"]
    elif key == "stage":
        for stage in get_args(Stage):
            yield REQUIRED.get(stage, [])
