"""Facts about the names in vLLM's sources that kvgate relies on, per release, in contract/facts/vllm.json.

To add a release, unpack its source distribution and run this script; it neither imports nor builds vLLM:

    PYTHONPATH=.:tests python -m helpers.engines.vllm_facts vllm-0.33.0/vllm
"""

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FACTS = Path(__file__).resolve().parents[2] / "contract" / "facts" / "vllm.json"

CALLED = {
    "engine/arg_utils.py": ("EngineArgs.create_engine_config",),
    "entrypoints/llm.py": ("LLM.__init__",),
    "v1/engine/llm_engine.py": ("LLMEngine.add_request", "LLMEngine.step", "LLMEngine.has_unfinished_requests"),
    "v1/executor/abstract.py": ("Executor.collective_rpc",),
    "v1/core/kv_cache_manager.py": ("KVCacheManager.free", "KVCacheManager.get_block_ids"),
    "v1/core/block_pool.py": ("BlockPool.get_num_free_blocks",),
    "v1/attention/backends/cpu_attn.py": ("CPUAttentionBackendImpl.do_kv_cache_update",),
    "v1/sample/logits_processor/__init__.py": ("AdapterLogitsProcessor.new_req_logits_processor",),
}
"""Functions that the worker calls, overrides or replaces."""
SAMPLING = ("temperature", "max_tokens", "ignore_eos", "detokenize", "logprobs", "extra_args")
"""Sampling parameters that the worker's requests set."""


def recorded() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(FACTS.read_text(encoding="utf-8")) if FACTS.is_file() else {}
    return loaded


def engine_arguments() -> set[str]:
    """Return the engine arguments that kvgate sets: for serving, evaluation and memory pressure."""
    from helpers.engines.interpreter_bundles import config_of
    from stages.engines.vllm.backend import engine_args
    from stages.engines.vllm.engine import EVALUATION_ARGS

    serving = engine_args(config_of("vllm", "python3", kv_cache_gib=1), "auto", ["0"])
    return {"model", *serving, *EVALUATION_ARGS, "num_gpu_blocks_override"}


def facts(source: Path) -> dict[str, Any]:
    """Return the facts of a source tree."""
    arguments = dict(_definitions(source / "engine/arg_utils.py"))["EngineArgs"]
    sampling = dict(_definitions(source / "sampling_params.py"))["SamplingParams"]
    called = {name: _parameters(node) for name, node in _named(source, CALLED)}
    return {
        "CacheDType": _literals(source / "config/cache.py", "CacheDType"),
        "EngineArgs": sorted(engine_arguments() & set(_fields(arguments))),
        "SamplingParams": sorted(set(SAMPLING) & set(_fields(sampling))),
        "called": called,
    }


def _named(source: Path, names: dict[str, tuple[str, ...]]) -> Iterator[tuple[str, Any]]:
    for file, wanted_names in names.items():
        definitions = dict(_definitions(source / file)) if (source / file).is_file() else {}
        yield from ((name, definitions[name]) for name in wanted_names if name in definitions)


def _definitions(path: Path) -> Iterator[tuple[str, Any]]:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            yield from ((f"{node.name}.{method.name}", method) for method in node.body if isinstance(method, ast.FunctionDef))
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node.name, node


def _fields(node: ast.ClassDef) -> list[str]:
    return [
        statement.target.id
        for statement in node.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    ]


def _parameters(node: ast.FunctionDef) -> list[str]:
    return [argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]


def _literals(path: Path, name: str) -> list[str]:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == name:
            return [str(constant.value) for constant in ast.walk(node.value) if isinstance(constant, ast.Constant)]
    raise LookupError(name)


def main(source: str) -> None:
    """Add a release's facts to the file."""
    version = re.search(r"-(\d+\.\d+\.\d+)", str(Path(source).resolve()))
    assert version is not None, "name the folder of the unpacked source distribution"
    releases = recorded() | {version[1]: facts(Path(source))}
    FACTS.write_text(json.dumps(releases, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
