"""backend=torch on a GPU: transformers' own model, in float32, whose decoding attends through the Triton kernels."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch

from pipeline.core.checkpoint import inspect_checkpoint
from pipeline.core.kv import KVPolicy, KVScales, KVShape, Side
from pipeline.core.records import PREFILL_CHUNK, MemoryReport, StoredCopy
from stages.checkpoints import load_causal_lm
from stages.engines.base import ChunkedEngine, Logits, check_positive
from stages.engines.cuda.cache import KernelCache
from stages.engines.cuda.device import resolve_device
from stages.engines.cuda.passes import DecodePass, PrefillPass, refuse_not_finite
from stages.engines.oracle.build import open_bundle
from stages.engines.oracle.model import scales_for, shape_for
from stages.engines.paged.kernel_layout import check_kernels


def load_engine(bundle: Path, *, threads: int, prefill_chunk: int = PREFILL_CHUNK) -> "KernelEngine":
    """Load a bundle of backend=torch onto the current GPU.

    Args:
        bundle: The bundle's directory.
        threads: Threads of all of torch in this process.
        prefill_chunk: Tokens of one prefill run.

    Raises:
        UserError: when a file is missing or was altered, and for a policy that the kernels do not hold.
        MissingRequirement: without a GPU, a CUDA build of torch, or Triton.
    """
    check_positive(threads=threads, prefill_chunk=prefill_chunk)
    device = resolve_device("cuda")
    policy, scales = open_bundle(bundle)
    info = inspect_checkpoint(bundle)
    check_kernels(policy, info.shape, info.q_heads)
    torch.set_num_threads(threads)
    return KernelEngine.from_model(
        load_causal_lm(bundle, dtype=torch.float32).to(device), policy, scales, prefill_chunk=prefill_chunk
    )


class KernelEngine(ChunkedEngine):
    """pipeline.core.records.Engine over the attention kernels.

    It has no `forced` on purpose: forced decode of a whole sequence at once would bypass the kernels. Step by step it runs
    through the kernels that are judged.
    """

    def __init__(self, model: Any, policy: KVPolicy, shape: KVShape, cache: KernelCache, chunk: int) -> None:
        super().__init__(policy, shape, int(model.config.vocab_size), chunk)
        self.model, self.cache = model, cache
        self._passes: dict[int, DecodePass] = {}
        """By padded batch size."""
        self._captured_moves = -1
        """`cache.moves` when the passes were captured."""
        self._pool: Any = None
        """Memory that the captured graphs share: no graph runs while the outputs of another are still needed."""

    @classmethod
    def from_model(
        cls, model: Any, policy: KVPolicy, scales: KVScales | None = None, *, prefill_chunk: int = PREFILL_CHUNK
    ) -> Self:
        """Return an engine around transformers' causal language model in float32.

        Args:
            model: The model, on a GPU, or on a CPU in a process whose kernels are interpreted (TRITON_INTERPRET=1).
            policy: How the cache is stored.
            scales: Its static scales; None when no side of the policy is static.
            prefill_chunk: Tokens of one prefill run.

        Raises:
            UserError: Policy, scales and model do not fit together, or the kernels do not hold the policy.
        """
        shape = shape_for(model, policy)
        layouts = check_kernels(policy, shape, model.config.num_attention_heads)
        cache = KernelCache(layouts, scales_for(policy, shape, scales), model.device)
        return cls(model.eval(), policy, shape, cache, prefill_chunk)

    @torch.inference_mode()
    def _start(self) -> int:
        return self.cache.start()

    @torch.inference_mode()
    def _prefill(self, sequence: int, prompt: Sequence[int]) -> Logits:
        self.cache.reserve([sequence], len(prompt))
        for chunk in self._chunks(prompt):
            logits = PrefillPass(self.model, self.cache, sequence).run(chunk)
        last: Logits = logits.cpu().numpy()
        return last

    @torch.inference_mode()
    def _decode(self, sequences: Sequence[int], tokens: Sequence[int]) -> Logits:
        self.cache.reserve(sequences, 1)
        self.cache.widen(sequences)
        step = self._pass(1 << (len(sequences) - 1).bit_length())
        step.put(sequences, tokens)
        step.run()
        logits, finite = step.read()
        batch = len(sequences)
        refuse_not_finite(finite[..., :batch], [(handle, self.cache.length(handle)) for handle in sequences])
        self.cache.advance(sequences)
        return logits[:batch]

    def _release(self, sequence: int) -> None:
        self.cache.release(sequence)

    def memory(self) -> MemoryReport:
        return self.cache.memory()

    def stored(self, sequence: int) -> list[dict[Side, StoredCopy]]:
        """Return what a sequence's pages hold, and the static scales that attention reads it with."""
        return [self.cache.stored(sequence, layer) for layer in range(self.shape.layers)]

    def corrupt_key_scale(self, factor: float) -> None:
        self.corrupt_scale(Side.KEY, factor)

    def corrupt_scale(self, side: Side, factor: float, layer: int | None = None, head: int | None = None) -> None:
        """See pipeline.core.records.CorruptibleEngine: of stored and of later tokens; the codes stay right."""
        with torch.inference_mode():
            self.cache.corrupt_scale(side, factor, layer, head)

    def repeat_page(self) -> None:
        """See pipeline.core.records.CorruptibleEngine."""
        with torch.inference_mode():
            self.cache.repeat_page()

    def _pass(self, batch: int) -> DecodePass:
        """The pass for `batch` sequences. Passes that were captured with old addresses are dropped."""
        if self._captured_moves != self.cache.moves:
            self._passes, self._captured_moves = {}, self.cache.moves
            self._pool = torch.cuda.graph_pool_handle() if self.cache.device.type == "cuda" else None
        if batch not in self._passes:
            step = DecodePass(self.model, self.cache, self.shape, batch)
            if self.cache.device.type == "cuda":
                step.capture(self._pool)
            self._passes[batch] = step
        return self._passes[batch]
