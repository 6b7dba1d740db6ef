"""backend=torch on a GPU: transformers' own model, with attention through the Triton kernels."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from stages.checkpoints.description import inspect_checkpoint
from stages.checkpoints.loading import load_causal_lm
from stages.core.records import PREFILL_CHUNK, MemoryReport, StoredCopy
from stages.engines.base import LOGIT_STEP
from stages.engines.bundle import ShapedRecord, open_bundle
from stages.engines.cuda.cache import KernelCache
from stages.engines.cuda.passes import DecodePass, PrefillPass
from stages.engines.gpu import resolve_device
from stages.engines.interface import Continuation, Engine, Logits
from stages.engines.paged.kernel_layout import check_kernels
from stages.engines.reference.build import BACKEND
from stages.engines.reference.model import scales_for, shape_for
from stages.policies.policy import KVPolicy, Side
from stages.policies.scales import KVScales

PREFILL_PASS_TOKENS = 4 * PREFILL_CHUNK
"""Maximum tokens of a pass over several sequences."""


def load_engine(bundle: Path, *, threads: int, compute_dtype: Literal["float32", "bfloat16"] = "float32") -> "KernelEngine":
    """Load a bundle of backend=torch onto the current GPU. `threads` applies to all of torch in this process."""
    resolve_device("cuda")
    _, policy, scales = open_bundle(bundle, ShapedRecord, BACKEND)
    info = inspect_checkpoint(bundle)
    check_kernels(policy, info.shape, info.q_heads)
    torch.set_num_threads(threads)
    model = load_causal_lm(bundle, dtype=getattr(torch, compute_dtype)).to("cuda")
    return KernelEngine(model, policy, scales)


class KernelEngine(Engine):
    """An engine over the attention kernels.

    It deliberately has no `forced` method: one pass over a whole sequence would bypass the decode kernels. They are judged by
    forced decoding step by step.
    """

    def __init__(self, model: Any, policy: KVPolicy, scales: KVScales | None = None) -> None:
        """Run transformers' causal language model (float32 or bfloat16) on a GPU, or on a CPU if TRITON_INTERPRET=1."""
        shape = shape_for(model, policy)
        super().__init__(policy, shape, int(model.config.vocab_size))
        layouts = check_kernels(policy, shape, model.config.num_attention_heads)
        self.cache = KernelCache(layouts, scales_for(policy, shape, scales), model.device)
        self.model = model.eval()
        self.logit_step = LOGIT_STEP[str(model.dtype).removeprefix("torch.")]
        self._passes: dict[int, DecodePass] = {}
        """Decode passes by padded batch size."""
        self._captured_moves = -1
        """`cache.moves` when the passes were captured."""
        self._pool: Any = None
        """Memory pool that the captured graphs share. No graph runs while another graph's outputs are still needed."""

    @torch.inference_mode()
    def _prefill_batch(self, prompts: Sequence[Sequence[int]]) -> tuple[list[int], Logits]:
        continuations = [Continuation(list(prompt), len(prompt), len(prompt)) for prompt in prompts]
        logits = np.zeros((len(prompts), self.vocab_size), np.float32)
        try:
            self._start(continuations)
            while unfinished := [request for request in continuations if request.stored < len(request.tokens)]:
                stored, rows = self._run_pass(unfinished)
                logits[[continuations.index(request) for request in stored]] = rows
        except BaseException:
            self._release_all(continuations)
            raise
        return [request.sequence for request in continuations], logits

    @torch.inference_mode()
    def _advance(self, live: Sequence[Continuation]) -> tuple[Sequence[Continuation], Logits]:
        """Run one token of every decoding sequence and the next chunks of joining prompts, which may wait for a later pass.

        A pass has at most PREFILL_PASS_TOKENS tokens. If no prompt joins, the step is a CUDA graph.
        """
        running = [request.sequence for request in live if request.stored >= request.prompt_tokens]
        if len(running) == len(live):
            return super()._advance(live)
        self.cache.reserve(running, 1)
        self._start([request for request in live if request.sequence < 0])
        return self._run_pass(live)

    def _start(self, continuations: Sequence[Continuation]) -> None:
        for request in continuations:
            request.sequence = self.cache.start()
            self.cache.reserve([request.sequence], len(request.tokens))

    def _run_pass(self, continuations: Sequence[Continuation]) -> tuple[list[Continuation], Logits]:
        """Store the next tokens of started continuations, and return the same result as `_advance`."""
        lengths = [len(request.tokens) - request.stored for request in continuations]
        planned = [(continuations[i], size) for i, size in plan_pass(lengths, self.prefill_chunk, PREFILL_PASS_TOKENS)]
        chunks = [(request.sequence, request.tokens[request.stored : request.stored + size]) for request, size in planned]
        logits = PrefillPass(self.model, self.cache, self.shape, chunks).run()
        for request, size in planned:
            request.stored += size
        rows = [row for row, (request, _) in enumerate(planned) if request.stored == len(request.tokens)]
        return [planned[row][0] for row in rows], logits[rows]

    @torch.inference_mode()
    def _decode(self, sequences: Sequence[int], tokens: Sequence[int]) -> Logits:
        self.cache.reserve(sequences, 1)
        self.cache.widen_page_table(sequences)
        step = self._pass(1 << (len(sequences) - 1).bit_length())
        step.put(sequences, tokens)
        step.run()
        logits = step.read()[: len(sequences)]
        self.cache.advance(sequences)
        return logits

    def _release(self, sequence: int) -> None:
        self.cache.release(sequence)

    def memory(self) -> MemoryReport:
        return self.cache.memory()

    def stored(self, sequence: int) -> list[dict[Side, StoredCopy]]:
        return [self.cache.stored(sequence, layer) for layer in range(self.shape.layers)]

    def corrupt_key_scale(self, factor: float) -> None:
        with torch.inference_mode():
            self.cache.corrupt_key_scale(factor)

    def _pass(self, batch: int) -> DecodePass:
        """Return the pass for `batch` sequences. Drops passes that were captured with old addresses."""
        if self._captured_moves != self.cache.moves:
            self._passes, self._captured_moves = {}, self.cache.moves
            self._pool = torch.cuda.graph_pool_handle() if self.cache.device.type == "cuda" else None
        if batch not in self._passes:
            step = DecodePass(self.model, self.cache, self.shape, batch)
            if self.cache.device.type == "cuda":
                step.capture(self._pool)
            self._passes[batch] = step
        return self._passes[batch]


def plan_pass(lengths: Sequence[int], chunk: int, max_tokens: int) -> list[tuple[int, int]]:
    """Return (index of the sequence, number of tokens to store) for every sequence that takes part in a pass.

    A prompt is always cut into the same chunks, because its tokens attend to earlier chunks through the quantized
    cache. Other sequences therefore affect the prompt's logits only by the order of sums. Sequences with one remaining token
    come first, because they are decoding and must not wait. Sequences that would exceed `max_tokens` wait for a later pass.
    """
    planned: list[tuple[int, int]] = []
    tokens = 0
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i] > 1):
        size = min(chunk, lengths[i])
        if not planned or tokens + size <= max_tokens:
            planned.append((i, size))
            tokens += size
    return planned
