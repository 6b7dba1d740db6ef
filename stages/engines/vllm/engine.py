"""The engine of vLLM."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, starmap
from pathlib import Path
from typing import Literal

import numpy as np

from stages.core.errors import MissingRequirement
from stages.core.records import MemoryReport, ServedRequest, StoredCopy
from stages.engines.base import LOGIT_STEP
from stages.engines.interface import ForcedRequest
from stages.engines.interpreter.backend import CHECKPOINT
from stages.engines.interpreter.process import Worker
from stages.engines.interpreter.requests import Bytes, InspectableEngine, forced_request
from stages.engines.vllm.backend import VllmBackend, VllmBundle, VllmFacts, on_cpu
from stages.engines.vllm.checkpoint import stored_scales, write_faulted
from stages.engines.vllm.config import VllmConfig
from stages.policies.formats import Format
from stages.policies.policy import FP16_POLICY, PAGE_TOKENS, Side, page_count
from stages.policies.scales import LayerDelivery

LOGPROBS = 20
"""Maximum log-probabilities per token in a request. An evaluation needs only the chosen token's."""
EVALUATION_ARGS: dict[str, object] = {
    "enforce_eager": True,
    "enable_prefix_caching": False,
    "async_scheduling": False,
    "max_logprobs": LOGPROBS,
    "disable_log_stats": False,
}
"""Engine arguments of an evaluation. CUDA graphs are off, because a captured step may ignore the must-fail control's fault.
Prompts are not reused from the cache, except in a full pool. Asynchronous scheduling is off, because a logits processor would
see each token one step late."""
CACHE = "kv_cache_memory_bytes"
MIN_CACHE = 2 << 30
"""Minimum bytes of an evaluation's cache per worker, if the bundle does not set the size. vLLM's default would take the memory
of the reference engine."""


class VllmEngine(InspectableEngine[VllmBundle, VllmConfig]):
    """An engine that sends requests to vLLM and reads scales and codes from its cache."""

    reads_itself = True
    """vLLM stores each token's key and value before attention, which reads only the cache, even for prompts."""

    full_pool_requests = 24
    """Default of `workloads.full_pool`. In production vLLM serves from a full pool, where most reported cache bugs occur."""

    def __init__(self, bundle: Path, backend: VllmBackend) -> None:
        super().__init__(bundle, backend)
        self.prefill_chunk = int(self._record.arguments["max_num_batched_tokens"])
        self.logit_step = LOGIT_STEP[str(self._record.arguments["dtype"])]
        self._evaluated = EVALUATION_ARGS
        self._facts: VllmFacts | None = None

    def _check_machine(self, bundle: Path) -> None:
        super()._check_machine(bundle)
        built, platform = self._record.platform, self._interpreter.description.platform
        if built != platform:
            raise MissingRequirement(
                f"{bundle}: its engine arguments are pinned for vLLM on {built}, but {self._interpreter.python} has vLLM on "
                f"{platform}: build it again with stage=build, or give a python of that platform as backend.python"
            )

    def serve_rounds(
        self, rounds: Sequence[Sequence[ForcedRequest]], rows: int, pages: int | None = None
    ) -> list[list[ServedRequest]]:
        for tokens, first in chain.from_iterable(rounds):
            self._check_forced(tokens, first)
        if pages is None:
            return [self._serve(requests, rows) for requests in rounds]
        size = int(self._record.arguments["block_size"])
        blocks = -(-pages * PAGE_TOKENS // size)
        # One more block: vLLM's null block stores no tokens. No sequence may be longer than the pool.
        longest = min(self.max_tokens, blocks * size)
        with self._restart(enable_prefix_caching=True, num_gpu_blocks_override=blocks + 1, max_model_len=longest):
            return [self._serve(requests, rows) for requests in rounds]

    def _serve(self, requests: Sequence[ForcedRequest], rows: int) -> list[ServedRequest]:
        forced = [request._replace(skip=max(1, request.tokens - rows)) for request in starmap(forced_request, requests)]
        return [
            ServedRequest(logits, answer.preempted, answer.reused, tuple(answer.blocks)) for answer, logits in self._run(forced)
        ]

    def delivery(self) -> list[LayerDelivery]:
        """Return, by layer, the scales of the checkpoint and the scales that the loaded layers read.

        A policy whose scales are all 1.0 needs no scales in the checkpoint, because 1.0 is vLLM's default.
        """
        loaded_scales = self._read_facts().scales
        carried = [{side: scales.scale for side, scales in layer.items()} for layer in self._scales.layers]
        if self._record.kv_scales_in_checkpoint:
            carried = stored_scales(self._bundle / CHECKPOINT, self.shape.layers)
        return [
            LayerDelivery(dict(stored), self._scales_by_side(layer))
            for stored, layer in zip(carried, loaded_scales, strict=True)
        ]

    def _scales_by_side(self, layer: Mapping[Literal["key", "value"], Sequence[float]]) -> dict[Side, tuple[float, ...]]:
        # With several workers vLLM repeats a shared scale for each head.
        by_head = self.policy.key.granularity == "per_head"
        return {Side(side): tuple(numbers if by_head else dict.fromkeys(numbers)) for side, numbers in layer.items()}

    def close(self) -> None:
        super().close()
        self._facts = None

    def _read_facts(self) -> VllmFacts:
        if self._facts is None:
            self._facts = self._call("facts", VllmFacts)
        return self._facts

    @contextmanager
    def _restart(self, **changes: object) -> Iterator[None]:
        """Within this context, serve requests by a model that was reloaded with changed engine arguments."""
        self.close()
        self._evaluated = {**EVALUATION_ARGS, **changes}
        try:
            yield
        finally:
            self.close()
            self._evaluated = EVALUATION_ARGS

    def _open(self) -> Worker:
        threads, workers = self._config.threads, int(self._record.arguments["tensor_parallel_size"])
        if on_cpu(self._interpreter) and workers > 1:  # vLLM would bind each worker to its own NUMA node
            threads = threads or max(1, len(os.sched_getaffinity(0)) // workers)
        bound = {"OMP_NUM_THREADS": str(threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"} if threads else {}
        carried = self._record.kv_scales_in_checkpoint  # otherwise the worker multiplies the keys
        model = self._checkpoint(partial(write_faulted, self._scales)) if carried else self._bundle / CHECKPOINT
        two_longest = 2 * self.max_tokens * FP16_POLICY.bytes_per_token(self.shape)
        arguments = {CACHE: max(MIN_CACHE, two_longest), **self._record.arguments, **self._evaluated}
        return self._load_model(bound, model, engine_args=arguments, key_fault=self._fault)

    def _memory_of(self, lengths: Sequence[int]) -> MemoryReport:
        """Return the memory of the blocks that sequences of these lengths fill."""
        if not lengths:
            return MemoryReport(0, 0, 0, 0, 0)
        facts = self._read_facts()
        blocks = sum(-(-length // facts.block_tokens) for length in lengths)
        return MemoryReport(
            pool_bytes=blocks * facts.block_bytes,
            exact_bytes=0,
            window_bytes=0,
            pages=page_count(blocks * facts.block_tokens),
            live_tokens=sum(lengths),
        )

    def _copy(self, stored: Bytes, layer: int, side: Side, form: Format) -> StoredCopy:
        codes = stored.reshape(self.shape.kv_heads, -1, form.token_bytes(self.shape.head_dim))
        scales = np.array(self._scales_by_side(self._read_facts().scales[layer])[side], np.float32).reshape(-1, 1, 1)
        return StoredCopy(0, codes, None, None, scales if form.static else None, None)


load_engine = VllmEngine
