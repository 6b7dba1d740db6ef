"""Suggests the command that makes the missing evidence for a use.

The command judges at most three policies, and sets every key that the use needs.
"""

import os
from collections.abc import Sequence

from pipeline.cli.next_steps import command_line
from pipeline.config.config import Config
from pipeline.config.override_syntax import key_of
from stages.checkpoints.intake.shapes import ModelShape
from stages.core.memory import GIB
from stages.engines.config import InProcessConfig
from stages.engines.vllm.config import VllmConfig
from stages.planning.capacity import Capacity
from stages.planning.duration import PRODUCTS, SCALING
from stages.planning.recommend import NOT_SERVED, Recommendation
from stages.policies.policy import whole_pages
from stages.verdict.gates.evaluation import RECOMMENDED_DOCUMENTS
from stages.workloads.config import LONG_DOCUMENTS

MAX_DEFAULT_TOKENS = 640
"""Maximum tokens, in whole pages, of the questions that `workloads=chat` asks."""
MIN_LONG_TOKENS = 1024
"""Minimum length of documents in a suggested command. Shorter documents have no room for their records."""
MAX_POLICIES = 3
"""Maximum policies in a suggested command."""
SLOW_S = 3600
"""Seconds of prefill on this machine's CPU from which a GPU is suggested."""
GPU_SHARE = 0.75
"""Share of a GPU that vLLM may use under `experiment=vllm`; the reference engine takes the rest."""
ACTIVATIONS_GIB = 5
"""Memory of vLLM's activations, as in docs/serve-8b.md."""
GPU_NOTE = "a CPU takes hours for this use: judge it with vLLM on a GPU, then repeat this command with backend=vllm"


def evidence_lines(
    config: Config, arguments: Sequence[str], recommendation: Recommendation, capacity: Capacity, model: ModelShape
) -> list[str]:
    """Return lines with the policies to judge first, and the command that judges these policies.

    If no policy is left to judge, return at most a line about a policy of the user that the backend does not serve. `arguments`
    are the user's arguments, which the command repeats. A policy that the user chose with `kv=` is suggested alone, unless it
    already has evidence or admits too few requests.
    """
    kv_arguments = [part for part in arguments if _group(part) == "kv"]
    own_policy = next((entry.name for entry in capacity.policies if kv_arguments and entry.policy == config.kv), None)
    with_vllm = isinstance(config.backend, VllmConfig)
    slow = not with_vllm and recommendation.chosen is None and _is_slow(config, arguments, model)
    tokens = {entry.name: entry.live_tokens for entry in recommendation.unjudged}
    if slow:  # all policies with room for the requests, not only those that the CPU backend serves
        tokens = {entry.name: entry.live_tokens for entry in capacity.policies if entry.requests >= capacity.use.concurrency}
    ladder = VllmConfig.finer if slow else config.backend.finer
    chosen = [name for name in reversed(ladder) if name in tokens][:MAX_POLICIES]
    policies = ["kv=" + ",".join(chosen)]
    if own_policy in tokens and (own_policy in ladder or not slow):
        chosen, policies = [str(own_policy)], kv_arguments
    refused = any(entry.name == own_policy and entry.reason == NOT_SERVED for entry in recommendation.passed_over)
    lines = [f"  not {own_policy!s}: {NOT_SERVED}"] if refused and not slow else []
    if not chosen:
        return lines
    remaining = [part for part in arguments if _group(part) not in ("stage", "kv", "capacity")]
    changes = _vllm_keys(config, capacity, remaining) if with_vllm or slow else _length_keys(config)
    changes += _use_keys(config, changes)
    command = command_line(remaining, *changes, "stage=evaluate", *policies, sweep=len(chosen) > 1)
    named = ", ".join(f"{name} ({tokens[name]:,})" for name in chosen)
    lines += [f"  {GPU_NOTE}"] if slow else []
    return [*lines, f"  judge {named} with", f"    {command}", *_answers_note(config)]


def _answers_note(config: Config) -> list[str]:
    """Return a note if only questions of the user can have answers of the use's length; an empty list otherwise."""
    use = config.capacity
    if config.workloads.jsonl is not None or whole_pages(use.longest) <= MAX_DEFAULT_TOKENS:
        return []
    return [
        f"  questions about long documents have short answers: to cover capacity.new_tokens={use.new_tokens}, ask "
        f"your own with workloads=jsonl workloads.jsonl=FILE workloads.max_scored_tokens={use.new_tokens}"
    ]


def _group(argument: str) -> str:
    return key_of(argument).partition(".")[0]


def _is_slow(config: Config, arguments: Sequence[str], model: ModelShape) -> bool:
    """Return whether the default engine would prefill the use's documents for hours; False if the user chose the backend."""
    if not isinstance(config.backend, InProcessConfig) or model.parameters is None:
        return False
    if {"backend", "experiment"} & {_group(part) for part in arguments}:
        return False
    documents = 2 * LONG_DOCUMENTS * config.capacity.longest
    return bool(2 * model.parameters * documents / PRODUCTS / config.backend.threads**SCALING > SLOW_S)


def _length_keys(config: Config) -> list[str]:
    """Return arguments for questions of the use's length, and for engines of this length."""
    key, longest = config.backend.length_key, whole_pages(config.capacity.longest)
    if longest <= MAX_DEFAULT_TOKENS:
        return []
    limit = [] if key is None else [f"backend.{key}={longest}"]
    questions = config.workloads.jsonl or config.workloads.lengths
    return limit if questions else [f"workloads.lengths=[{longest}]", *limit]


def _vllm_keys(config: Config, capacity: Capacity, remaining: Sequence[str]) -> list[str]:
    """Return arguments that judge with vLLM at the use's length, batch, GPUs and cache."""
    use, budget, given_keys = config.capacity, capacity.budget, set(map(key_of, remaining))
    longest, cache = max(whole_pages(use.longest), MIN_LONG_TOKENS), capacity.cache_bytes // GIB
    keys = [] if "experiment" in given_keys else ["experiment=vllm"]
    if config.workloads.jsonl is not None and "workloads.lengths" not in given_keys:
        keys.append("workloads.lengths=[]")
    keys.append(f"backend.max_model_len={longest}")
    if "backend.max_num_seqs" not in given_keys:
        keys.append(f"backend.max_num_seqs={use.concurrency}")
    if use.tensor_parallel > 1:
        keys.append(f"backend.tensor_parallel_size={use.tensor_parallel}")
    # A plan may give the cache the memory that the reference engine needs while kvgate judges.
    cache = min(cache, int(GPU_SHARE * budget.gpu - budget.weights) // GIB - ACTIVATIONS_GIB)
    if "backend.kv_cache_gib" not in given_keys and cache > 0:
        keys.append(f"backend.kv_cache_gib={cache}")
    if config.workloads.jsonl is None and "workloads.length_documents" not in given_keys:
        keys.append(f"workloads.length_documents={RECOMMENDED_DOCUMENTS}")
    python = config.backend.python if isinstance(config.backend, VllmConfig) else os.environ.get("KVGATE_VLLM_PYTHON")
    return keys if python else [*keys, "backend.python=PYTHON"]


def _use_keys(config: Config, changes: Sequence[str]) -> list[str]:
    """Return arguments for the use's answers and batch, unless `changes` already set them."""
    use, workloads, groups = config.capacity, config.workloads, set(map(key_of, changes))
    keys = []
    if "experiment" not in groups and use.concurrency > max(workloads.batch_size, workloads.stress_test.max_batch):
        keys.append(f"workloads.batch_size={use.concurrency}")
    if workloads.jsonl is not None or not groups & {"experiment", "workloads.lengths"}:
        keys.append(f"workloads.max_scored_tokens={use.new_tokens}")
    return keys
