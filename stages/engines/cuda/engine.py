"""backend=torch on a GPU: transformers' own model, with attention through the Triton kernels.

Shapes: L layers, B sequences of a step, Hq query heads, H KV heads, S new tokens, D head_dim.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import AttentionInterface

from plugins.kv_attention import launch
from plugins.kv_attention.layout import CacheLayout
from stages.checkpoints.description import inspect_checkpoint
from stages.checkpoints.loading import load_causal_lm
from stages.engines.base import LOGIT_STEP, Mode, check_finite
from stages.engines.bundle import ShapedRecord, open_bundle
from stages.engines.cuda.cache import KernelCache
from stages.engines.gpu import resolve_device
from stages.engines.interface import Logits
from stages.engines.paged.engine import PagedEngine
from stages.engines.paged.kernel_layout import check_kernels
from stages.engines.reference.build import BACKEND
from stages.engines.reference.model import head, hidden_states, refuse_options, scales_for, shape_for
from stages.engines.staging import StagedInputs, StepResults
from stages.policies.policy import PAGE_TOKENS, SIDES, KVPolicy, page_count
from stages.policies.scales import KVScales

ATTENTION = "kvgate_kernels"

WARM_UP = 2
"""Number of runs before a capture. They compile kernels and initialize libraries, which is not allowed in a capture."""


def load_engine(bundle: Path, *, threads: int, compute_dtype: Literal["float32", "bfloat16"] = "float32") -> "KernelEngine":
    """Load a bundle of backend=torch onto the current GPU. `threads` applies to all of torch in this process."""
    resolve_device("cuda")
    _, policy, scales = open_bundle(bundle, ShapedRecord, BACKEND)
    info = inspect_checkpoint(bundle)
    check_kernels(policy, info.shape, info.q_heads)
    torch.set_num_threads(threads)
    model = load_causal_lm(bundle, dtype=getattr(torch, compute_dtype)).to("cuda")
    return KernelEngine(model, policy, scales)


class KernelEngine(PagedEngine):
    """An engine over the attention kernels.

    It deliberately has no `forced` method: one pass over a whole sequence would bypass the decode kernels. They are judged by
    forced decoding step by step.
    """

    pool: KernelCache

    def __init__(self, model: Any, policy: KVPolicy, scales: KVScales | None = None) -> None:
        """Run transformers' causal language model (float32 or bfloat16) on a GPU, or on a CPU if TRITON_INTERPRET=1."""
        shape = shape_for(model, policy)
        layouts = check_kernels(policy, shape, model.config.num_attention_heads)
        scales = scales_for(policy, shape, scales)
        super().__init__(int(model.config.vocab_size), scales, KernelCache(layouts, policy, shape, scales, model.device))
        self.model = model.eval()
        self.logit_step = LOGIT_STEP[str(model.dtype).removeprefix("torch.")]
        self._passes: dict[int, DecodePass] = {}
        """Decode passes by padded batch size."""
        self._captured_moves = -1
        """`pool.moves` when the passes were captured."""
        self._graph_memory: Any = None
        """Memory pool that the captured graphs share. No graph runs while another graph's outputs are still needed."""

    @torch.inference_mode()
    def _run(self, mode: Mode, handles: Sequence[int], ids: npt.NDArray[np.int64]) -> Logits:
        if mode == "prefill":
            logits = PrefillPass(self, handles[0], ids[0]).run()
        else:
            self.pool.widen_page_table(handles)
            step = self._pass(1 << (len(handles) - 1).bit_length())
            step.put(handles, ids[:, 0])
            step.run()
            logits = step.read()[: len(handles)]
        self.pool.advance(handles, ids.shape[1])
        return logits

    def corrupt_key_scale(self, factor: float) -> None:
        super().corrupt_key_scale(factor)
        self.pool.moves += 1  # captured steps store new tokens with the previous factors

    def attention_tensors(self, layer: int) -> dict[str, Tensor]:
        """Return the tensors that attention reads in a layer. Their addresses are constant until `pool.moves` changes."""
        names = (f"{side}_scale" for side in SIDES)
        constants = {name: self._constants[f"{name}.{layer}"] for name in names if f"{name}.{layer}" in self._constants}
        return self.pool.layer(layer) | {name: constant.flatten() for name, constant in constants.items()}

    def store(self, keys: Tensor, values: Tensor, page_table: Tensor, positions: Tensor, exact_slots: Tensor) -> Tensor:
        """Store new tokens like `KernelCache.append_rows`, or none if a number is not finite, without waiting for the device.

        Return whether each layer's keys, and its values, are finite as float16 in rows with a position: (L, 2).
        """
        padding = positions < 0
        finite = torch.stack([(torch.isfinite(x.half()).flatten(2).all(-1) | padding).all(-1) for x in (keys, values)], 1)
        # A step stores all its tokens or none, because a refused token would overwrite a recent token that is still needed.
        stored = torch.where(finite.all(), positions, -1)
        self.pool.append_rows(keys, values, page_table, stored, exact_slots, self._faults)
        return finite

    def _pass(self, batch: int) -> "DecodePass":
        """Return the pass for `batch` sequences. Drops passes that were captured with old addresses."""
        if self._captured_moves != self.pool.moves:
            self._passes, self._captured_moves = {}, self.pool.moves
            self._graph_memory = torch.cuda.graph_pool_handle() if self.pool.device.type == "cuda" else None
        if batch not in self._passes:
            step = DecodePass(self, batch)
            if self.pool.device.type == "cuda":
                step.capture(self._graph_memory)
            self._passes[batch] = step
        return self._passes[batch]


class DecodePass:
    """A decode step of at most `batch` sequences, which is captured as one CUDA graph on a GPU.

    The host fills one buffer before the step and waits once for the results afterwards. All buffers have fixed addresses.

    Queries, keys and values enter the kernels in the model's type. float32 is not rounded to float16: the kernels split a
    float32 query into two float16 terms, which keep 22 of its 24 bits, and return float32. Only the rounding of softmax weights
    and the order of sums then differ from the reference engine, at the cost of one more small matrix product per tile.
    """

    def __init__(self, engine: KernelEngine, batch: int) -> None:
        self.engine, self.batch = engine, batch
        row = (torch.int32, (batch,))
        columns = engine.pool.columns
        sections = {"ids": row, "positions": row, "exact_slots": row, "page_table": (torch.int32, (batch, columns))}
        self.inputs = StagedInputs(sections, engine.pool.device)
        tensors = self.inputs.tensors
        tensors["positions"].fill_(-1)
        self.page_table, self.exact_slots = tensors["page_table"], tensors["exact_slots"]
        self.keys, self.values = new_tokens(engine, batch)
        self._lengths: Tensor
        self._plans: dict[int, launch.DecodePlan] = {}
        """Work lists of this step by the number of programs that fill the GPU."""
        self._logits: Tensor
        """Logits (batch, vocab_size)."""
        self._finite: Tensor
        """Whether each layer's new keys, and its new values, are finite as float16: (L, 2)."""
        self._results: StepResults | None = None
        self._graph: torch.cuda.CUDAGraph | None = None

    def capture(self, pool: Any) -> None:
        """Capture `run` into a CUDA graph, which takes its memory from `pool`.

        All positions must still be -1, so that the warm-up runs append nothing. An append could overwrite needed tokens.
        """
        device = self.engine.pool.device
        warm_up = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        warm_up.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(warm_up):
            for _ in range(WARM_UP):
                self._forward()
        torch.cuda.current_stream(device).wait_stream(warm_up)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            self._forward()
        self._graph = graph

    def put(self, handles: Sequence[int], tokens: npt.NDArray[np.int64]) -> None:
        """Fill the first rows with one token per sequence. The other rows get position -1, so they store nothing."""
        sequences, arrays = [self.engine.pool.sequences[handle] for handle in handles], self.inputs.arrays
        batch = len(sequences)
        arrays["ids"][:batch] = tokens
        arrays["positions"][:batch] = [sequence.length for sequence in sequences]
        arrays["positions"][batch:] = -1
        arrays["exact_slots"][:batch] = [sequence.buffer for sequence in sequences]
        for row, sequence in zip(arrays["page_table"], sequences, strict=False):
            row[: len(sequence.pages)] = sequence.pages  # later columns are never read
        self.inputs.upload()

    def run(self) -> None:
        """Compute the step that `put` set up. Stores all its tokens, or none if a key or value is not finite."""
        if self._graph is None:
            self._forward()
        else:
            self._graph.replay()

    def read(self) -> Logits:
        """Wait for the step; return its logits (batch, vocab_size). Raises UserError if a key or value is not finite."""
        if self._results is None or self._graph is None:
            self._results = StepResults(self._logits, self._finite)
        logits, finite = self._results.read()
        check_finite(finite.astype(np.bool_))
        return logits.astype(np.float32)  # a copy

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        layout = self.engine.pool.layouts[layer]
        self.keys[layer].copy_(key[:, :, 0])
        self.values[layer].copy_(value[:, :, 0])
        return launch.decode_attention(
            layout,
            query[:, :, 0],
            self.keys[layer],
            self.values[layer],
            self.engine.attention_tensors(layer),
            page_table=self.page_table,
            lengths=self._lengths,
            plan=self._plan(layout, query[:, :, 0], scaling),
            scaling=scaling,
            exact_slots=self.exact_slots,
        ).unsqueeze(1)

    def _plan(self, layout: CacheLayout, query: Tensor, scaling: float) -> launch.DecodePlan:
        """Return the step's work list. Layers with the same number of programs share it."""
        programs = launch.default_programs(layout, query, self.page_table, scaling)
        if programs not in self._plans:
            self._plans[programs] = launch.plan_decode(layout, self._lengths, programs=programs)
        return self._plans[programs]

    def _forward(self) -> None:
        positions, model = self.inputs.tensors["positions"], self.engine.model
        self._lengths = positions.clamp(min=0)
        self._plans = {}
        ids = self.inputs.tensors["ids"][:, None]
        hidden = hidden_states(model, ATTENTION, ids, self._lengths[:, None].long(), step=self)
        self._logits = head(model, hidden[:, -1:])[:, 0].float()
        self._finite = self.engine.store(self.keys, self.values, self.page_table, positions, self.exact_slots)


class PrefillPass:
    """A chunk of one prompt.

    Its tokens attend to each other exactly and causally, and to earlier tokens through the quantized cache.
    """

    def __init__(self, engine: KernelEngine, handle: int, chunk: npt.NDArray[np.int64]) -> None:
        """Prepare the pass. Pages for the tokens must be reserved."""
        self.engine = engine
        sequence = engine.pool.sequences[handle]
        tokens, before = len(chunk), page_count(sequence.length)
        row, single = (torch.int32, (tokens,)), (torch.int32, (1,))
        sections = {"ids": row, "positions": row, "pages": (torch.int32, (tokens, 1)), "row_slots": row, "lengths": single}
        sections |= {"exact_slots": single, "page_table": (torch.int32, (1, max(1, before)))}
        self.inputs = StagedInputs(sections, engine.pool.device)
        end, first = sequence.length + tokens, sequence.length // PAGE_TOKENS
        positions = np.arange(sequence.length, end)
        arrays = self.inputs.arrays
        arrays["ids"][:], arrays["positions"][:] = chunk, positions
        arrays["pages"][:, 0] = np.array(sequence.pages[first : page_count(end)])[positions // PAGE_TOKENS - first]
        # A slot of the ring of recent tokens gets only its newest token. Earlier tokens get -1 - buffer: it keeps only sinks.
        newest = positions >= end - engine.policy.recent_tokens
        arrays["row_slots"][:] = np.where(newest, sequence.buffer, -1 - sequence.buffer)
        arrays["lengths"][:], arrays["exact_slots"][:] = sequence.length, sequence.buffer
        arrays["page_table"][0, :before] = sequence.pages[:before]
        self.keys, self.values = new_tokens(engine, tokens)

    def run(self) -> Logits:
        """Store the chunk and return the logits (1, vocab_size) of its last token.

        Raises UserError and stores nothing if a key or value is not finite.
        """
        tensors, model = self.inputs.tensors, self.engine.model
        self.inputs.upload()
        positions = tensors["positions"]
        hidden = hidden_states(model, ATTENTION, tensors["ids"][None], positions[None].long(), step=self)
        logits = head(model, hidden[:, -1:])[0].float()
        finite = self.engine.store(self.keys, self.values, tensors["pages"], positions, tensors["row_slots"])
        rows, flags = StepResults(logits, finite).read()
        check_finite(flags.astype(np.bool_))
        return rows.astype(np.float32, copy=False)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        tensors = self.inputs.tensors
        self.keys[layer].copy_(key[0].transpose(0, 1))
        self.values[layer].copy_(value[0].transpose(0, 1))
        return launch.context_attention(
            self.engine.pool.layouts[layer],
            query[0].transpose(0, 1),
            self.keys[layer],
            self.values[layer],
            self.engine.attention_tensors(layer),
            page_table=tensors["page_table"],
            lengths=tensors["lengths"],
            scaling=scaling,
            exact_slots=tensors["exact_slots"],
        )[None]


def new_tokens(engine: KernelEngine, rows: int) -> tuple[Tensor, Tensor]:
    """Return memory for the new keys and values (L, rows, H, D) of a pass."""
    shape, dtype = engine.shape, engine.model.dtype
    new = (2, shape.layers, rows, shape.kv_heads, shape.head_dim)
    keys, values = torch.zeros(new, dtype=dtype, device=engine.pool.device)
    return keys, values


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001
    scaling: float,
    *,
    step: DecodePass | PrefillPass,
    **options: Any,
) -> tuple[Tensor, None]:
    """Implement transformers' attention interface: query (B, Hq, S, D), key and value (B, H, S, D) -> (B, S, Hq, D).

    transformers computes no mask, since no mask function is registered under this name.
    """
    refuse_options(module, key.shape[1], options)
    return step.attend(int(module.layer_idx), query, key, value, scaling), None  # type: ignore[arg-type]


AttentionInterface.register(ATTENTION, _attention)
