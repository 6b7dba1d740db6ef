"""Kernels that decode_attention.py measures over random caches: kvgate's, as shipped and tuned, and the peers.

Shapes: B sequences, H KV heads in groups of G query heads, Hq = H * G, D head_dim.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from itertools import product

import torch
from torch import Tensor

from benchmarks.attention_cases import STORAGES, Case
from benchmarks.attention_peers import PEERS
from benchmarks.attention_step import Candidate, Kernel, Step
from plugins.kv_attention import launch
from plugins.kv_attention.kernels.variants import Variant, decode_variant

TUNED_WARPS = (1, 2, 4)
TUNED_STAGES = (1, 3, 5)
TUNED_RESIDENT = (4, 8, 16)
"""Programs per SM that the work is divided for."""


def _shipped(step: Step) -> Iterator[Candidate]:
    """The shipped launch, which chooses its variant itself, with the work list that a step makes once for all its layers."""
    device, case = step.query.device, step.case
    sm = launch.compute_capability(device)
    variant = decode_variant(step.layout, group=case.group, query_dtype="bfloat16", scaling=step.scaling, sm=sm)
    programs = launch.default_programs(step.layout, step.query, step.page_table, step.scaling)
    yield Candidate(_launch(step, None, programs), _parameters(variant, programs))


def _tuned(step: Step) -> Iterator[Candidate]:
    """The same kernels with other warps, stages and programs, which shows what a better choice would gain."""
    device, case = step.query.device, step.case
    sm = launch.compute_capability(device)
    default = decode_variant(step.layout, group=case.group, query_dtype="bfloat16", scaling=step.scaling, sm=sm)
    programs = launch.default_programs(step.layout, step.query, step.page_table, step.scaling)
    yield Candidate(_launch(step, default, programs), _parameters(default, programs))
    if device.type == "cpu":
        return
    sm_count = torch.cuda.get_device_properties(device).multi_processor_count
    counts = {
        launch.choose_programs(case.batch, case.kv_heads, case.pages, sm_count=sm_count, resident=resident)
        for resident in TUNED_RESIDENT
    }
    for warps, stages, count in product(TUNED_WARPS, TUNED_STAGES, sorted(counts | {programs})):
        if (warps, stages, count) != (default.num_warps, default.num_stages, programs):
            constants = default.constants | {"STAGES": stages}
            variant = replace(default, constants=constants, num_warps=warps, num_stages=stages)
            yield Candidate(_launch(step, variant, count), _parameters(variant, count))


def _launch(step: Step, variant: Variant | None, programs: int) -> Callable[[], Callable[[], Tensor]]:
    plan = launch.plan_decode(step.lengths, programs=programs)

    def run() -> Tensor:
        return launch.decode_attention(
            step.layout,
            step.query,
            step.key_new,
            step.value_new,
            step.cache,
            page_table=step.page_table,
            lengths=step.lengths,
            plan=plan,
            scaling=step.scaling,
            variant=variant,
        )

    return lambda: run


def _parameters(variant: Variant, programs: int) -> dict[str, int]:
    return {"programs": programs, "warps": variant.num_warps, "stages": variant.num_stages}


KERNELS = (
    *(Kernel(storage, storage, _shipped, 4e-3, with_new=True) for storage in STORAGES),
    *(Kernel(f"{storage} tuned", storage, _tuned, 4e-3, with_new=True) for storage in STORAGES),
    *PEERS,
)
"""The first three are the shipped kernels, the next three the same kernels tuned, the others peers."""


def unavailable_reason(kernel: Kernel, case: Case) -> str | None:
    """Return why a kernel cannot run on this machine or over these sequences, None when it can."""
    if kernel.library is not None and find_spec(kernel.library) is None:
        return f"{kernel.library} is not installed"
    return None if kernel.ragged or not case.ragged else "takes sequences of one length only"
