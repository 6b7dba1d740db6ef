"""The engine of vLLM."""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pipeline.core.errors import MissingRequirement, UserError
from pipeline.core.kv import PAGE_TOKENS, KVPolicy, Side
from pipeline.core.records import LayerDelivery, LoadTimes, MemoryReport, StoredCopy
from pipeline.core.scales import KVScales
from stages.engines.base import LOGIT_STEP, Logits
from stages.engines.interpreter.protocol import EmptyAnswer, Generation
from stages.engines.interpreter.requests import RequestEngine, open_model, whole
from stages.engines.vllm import settings
from stages.engines.vllm.bundle import CHECKPOINT, LIBRARY, VllmBundle, open_bundle
from stages.engines.vllm.checkpoint import delivered, write_faulted
from stages.engines.vllm.interpreter import Interpreter, Worker, probe
from stages.engines.vllm.protocol import Facts, LoadedInBlocks, ShownRunAnswer


def load_engine(bundle: Path, *, python: str | None, timeout_s: int, threads: int | None) -> "VllmEngine":
    """Load a bundle that build_bundle wrote; vLLM itself starts with the first request.

    Args:
        bundle: The bundle's directory.
        python: vLLM's interpreter, backend.python.
        timeout_s: Seconds that a request may take.
        threads: CPU threads of the engine; None leaves them to vLLM.

    Raises:
        UserError: A file is missing or was altered.
        MissingRequirement: This machine cannot run the engine.
    """
    described, policy, scales = open_bundle(bundle)
    interpreter = probe(python)
    here = (interpreter.release, interpreter.description.platform)
    if (described.built_for.version, described.platform) != here:
        raise MissingRequirement(
            f"{bundle}: its engine arguments are pinned for {LIBRARY} {described.built_for.version} on {described.platform}, "
            f"{interpreter.python} has {here[0]} on {here[1]}: build it again with stage=build, or give that release's python "
            "as backend.python"
        )
    return VllmEngine(bundle.absolute(), described, policy, scales, interpreter, timeout_s=timeout_s, threads=threads)


class VllmEngine(RequestEngine):
    """Requests to vLLM, with the scales and codes that it shows of its cache."""

    reads_itself = True
    """vLLM writes a token's key and value before it attends, and attends to the cache alone, in prompts as well."""

    def __init__(
        self,
        bundle: Path,
        described: VllmBundle,
        policy: KVPolicy,
        scales: KVScales,
        interpreter: Interpreter,
        *,
        timeout_s: int,
        threads: int | None,
    ) -> None:
        super().__init__(
            policy, described.shape, described.vocab_size,
            max_tokens=described.max_tokens, max_batch=described.max_batch, timeout_s=timeout_s,
        )  # fmt: skip
        self._bundle, self._described, self._scales = bundle, described, scales
        self._python, self._threads_asked = interpreter.python, threads
        self.prefill_chunk = int(described.engine_args["max_num_batched_tokens"])
        self.logit_step = LOGIT_STEP[str(described.engine_args["dtype"])]
        self._fault = 1.0
        self._reuse = False
        self._facts: Facts | None = None
        self._faulted: tempfile.TemporaryDirectory[str] | None = None
        self._shown: list[list[dict[Side, StoredCopy]]] = []
        """What the cache held of each request of the last `forced_together`."""

    def forced_together(self, requests: Sequence[tuple[Sequence[int], int]]) -> list[Logits]:
        """`stored_request` then shows what the cache held of each."""
        self._shown = []
        for tokens, first in requests:
            self._check_forced(tokens, first)
        asked = [whole(tokens, first) for tokens, first in requests]
        for prompt, _, count, _ in asked:
            self._check_fits(len(prompt), count)
        with tempfile.TemporaryDirectory(prefix="kvgate-logits-") as folder:
            named = [dict(zip(("prompt", "forced", "tokens", "skip"), request, strict=True)) for request in asked]
            answers = self._call("run", ShownRunAnswer, requests=named, folder=folder, show=True).answers
            self._shown = [
                self._stored(Path(answer.stored), len(tokens)) if answer.stored else []
                for answer, (tokens, _) in zip(answers, requests, strict=True)
            ]
            return [self._rows(answer) for answer in answers]

    def stored_request(self, number: int) -> Sequence[Mapping[Side, StoredCopy]]:
        """Return what the cache held of a request of the last `forced_together`; empty where its layout is not known."""
        return self._shown[number]

    def forced_reusing(self, requests: Sequence[tuple[Sequence[int], int]]) -> list[Logits]:
        """Return what `forced` returns of each (tokens, first) over a prefix that an earlier request left in the cache."""
        self._restart(reuse=True)
        try:
            self._run([(list(tokens[:first]), [], 1, 0) for tokens, first in requests])
            return [rows for _, rows in self._run([whole(tokens, first) for tokens, first in requests])]
        finally:
            self._restart(reuse=False)

    def delivery(self) -> list[LayerDelivery]:
        """Return, by layer, the scales of the checkpoint and those that the loaded layers read.

        A policy whose scales are all 1.0 needs none in the checkpoint: vLLM takes 1.0 by itself.
        """
        used = self._loaded().scales
        carried = [{side: scales.scale for side, scales in layer.items()} for layer in self._scales.layers]
        if self._described.kv_scales_in_checkpoint:
            carried = delivered(self._bundle / CHECKPOINT, self.shape.layers)
        return [
            LayerDelivery(dict(given), {Side.KEY: tuple(layer.key), Side.VALUE: tuple(layer.value)})
            for given, layer in zip(carried, used, strict=True)
        ]

    def memory(self) -> MemoryReport:
        """Return the bytes of the live sequences' blocks, as vLLM allocated them."""
        lengths = self._lengths()
        if not lengths:
            return MemoryReport(0, 0, 0, 0, 0, 0)
        facts = self._loaded()
        blocks = sum(-(-length // facts.block_tokens) for length in lengths)
        return self._memory(blocks, facts, sum(lengths))

    def timed(self, prompts: Sequence[Sequence[int]], steps: int) -> LoadTimes:
        """Return vLLM's own times of `steps` decode steps: timing the steps from here would time the requests."""
        loaded = self._load(prompts, steps, LoadedInBlocks)
        memory = self._memory(loaded.blocks, self._loaded(), sum(len(prompt) + steps for prompt in prompts))
        return LoadTimes(loaded.first_token_ms, loaded.step_ms, memory)

    def corrupt_key_scale(self, factor: float) -> None:
        """Let keys be read with `factor` times the right scale, from the next request on.

        The wrong scale goes the way that the right one goes, in a checkpoint; the codes stay right. A cache without scales
        stores `factor` times the keys.
        """
        self._fault *= factor
        self.close()

    def close(self) -> None:
        super().close()
        self._facts = None

    def _check_fits(self, prompt: int, tokens: int) -> None:
        if prompt + tokens > self.max_tokens:
            raise UserError(
                f"backend.max_model_len={self.max_tokens}: a prompt of {prompt} tokens with {tokens} more does not fit; "
                "raise it"
            )

    def _answers(self, requests: Sequence[dict[str, object]], folder: str) -> Sequence[Generation]:
        return self._call("run", ShownRunAnswer, requests=requests, folder=folder, show=False).answers

    def _loaded(self) -> Facts:
        if self._facts is None:
            self._facts = self._call("facts", Facts)
        return self._facts

    def _restart(self, *, reuse: bool) -> None:
        """Let the next request load the model with or without prefix caching."""
        self.close()
        self._reuse = reuse

    def _open(self) -> Worker:
        worker = Worker(self._python, self._threads_asked)
        arguments = settings.evaluation(self._described.engine_args, prefix_caching=self._reuse)
        fault = None if self._fault == 1.0 else self._fault
        open_model(worker, self._checkpoint(), self._timeout_s, EmptyAnswer, engine_args=arguments, key_fault=fault)
        return worker

    def _checkpoint(self) -> Path:
        """The checkpoint's directory. With a fault, another one is written for it."""
        if self._fault == 1.0 or not self._described.kv_scales_in_checkpoint:
            return self._bundle / CHECKPOINT
        self._faulted = tempfile.TemporaryDirectory(prefix="kvgate-canary-")
        faulted = Path(self._faulted.name) / CHECKPOINT
        write_faulted(self._bundle / CHECKPOINT, faulted, self._scales, self._fault)
        return faulted

    def _memory(self, blocks: int, facts: Facts, live_tokens: int) -> MemoryReport:
        scales = 2 * 4 * len(facts.scales) if self._described.kv_scales_in_checkpoint else 0
        return MemoryReport(
            pool_bytes=blocks * facts.block_bytes,
            exact_bytes=0,
            window_bytes=0,
            static_scale_bytes=scales,
            pages=-(-blocks * facts.block_tokens // PAGE_TOKENS),
            live_tokens=live_tokens,
        )

    def _stored(self, path: Path, length: int) -> list[dict[Side, StoredCopy]]:
        """Return the copies of a file that the worker wrote: keys, then values, of every layer."""
        shape, form = self.shape, self.policy.key
        width = form.token_bytes(shape.head_dim)
        raw = np.fromfile(path, np.uint8).reshape(shape.layers, 2, shape.kv_heads, length, width)
        used = self._loaded().scales
        copies = []
        for layer in range(shape.layers):
            scales = {Side.KEY: used[layer].key, Side.VALUE: used[layer].value}
            copies.append(
                {
                    side: StoredCopy(0, raw[layer, i], None, None, _static(scales[side]) if form.static else None, None)
                    for i, side in enumerate((Side.KEY, Side.VALUE))
                }
            )
        return copies


def _static(scales: Sequence[float]) -> npt.NDArray[np.float32]:
    return np.array(scales, np.float32).reshape(-1, 1, 1)
