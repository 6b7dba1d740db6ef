"""The engine of TensorRT-LLM."""

import tempfile
from pathlib import Path

from pipeline.core.errors import MissingRequirement, UserError
from pipeline.core.kv import KVPolicy, Side
from pipeline.core.records import LayerDelivery
from pipeline.core.scales import KVScales
from stages.engines.bundle import BuiltFor, check_built_for
from stages.engines.interpreter.protocol import EmptyAnswer
from stages.engines.interpreter.requests import RequestEngine, open_model
from stages.engines.trtllm.build import compile_engine
from stages.engines.trtllm.bundle import CHECKPOINT, ENGINE, LIBRARY, TrtllmBundle, open_bundle
from stages.engines.trtllm.checkpoint import write_faulted
from stages.engines.trtllm.interpreter import Interpreter, Worker, probe, require_gpus


def load_engine(bundle: Path, *, python: str | None, timeout_s: int, build_timeout_s: int) -> "TrtllmEngine":
    """Load a bundle that build_bundle wrote; TensorRT-LLM itself starts with the first request.

    Args:
        bundle: The bundle's directory.
        python: TensorRT-LLM's interpreter, backend.python.
        timeout_s: Seconds that a request may take.
        build_timeout_s: Seconds that building the canary's engine may take.

    Raises:
        UserError: A file is missing or was altered.
        MissingRequirement: This machine cannot run the engine.
    """
    described, policy, scales = open_bundle(bundle)
    interpreter = probe(python)
    ranks = described.tensor_parallel_size
    if described.target == "engine":
        capabilities = interpreter.compute_capabilities(ranks)
        machine = BuiltFor(library=LIBRARY, version=interpreter.release, compute_capabilities=capabilities)
        check_built_for(bundle, described.built_for, machine, exactly=True)
    elif described.built_for.version != interpreter.release:
        raise MissingRequirement(
            f"{bundle}: its LLM arguments are pinned for {LIBRARY} {described.built_for.version}, {interpreter.python} has "
            f"{interpreter.release}: build it again with stage=build, or give that release's python as backend.python"
        )
    require_gpus(interpreter, ranks, "running an engine")
    return TrtllmEngine(
        bundle.absolute(), described, policy, scales, interpreter, timeout_s=timeout_s, build_timeout_s=build_timeout_s
    )


class TrtllmEngine(RequestEngine):
    """Requests to TensorRT-LLM."""

    def __init__(
        self,
        bundle: Path,
        described: TrtllmBundle,
        policy: KVPolicy,
        scales: KVScales,
        interpreter: Interpreter,
        *,
        timeout_s: int,
        build_timeout_s: int,
    ) -> None:
        batch = int(described.asked.get("max_batch_size", described.asked.get("build_config.max_batch_size", 1)))
        super().__init__(
            policy, described.shape, described.vocab_size,
            max_tokens=described.max_seq_len, max_batch=batch, timeout_s=timeout_s,
        )  # fmt: skip
        self._scales = scales
        self._bundle, self._described, self._python = bundle, described, interpreter.python
        self._build_timeout_s = build_timeout_s
        self._static_scale_bytes = 2 * 4 * len(described.kv_scales)  # a float32 and its reciprocal
        self._fault = 1.0
        self._faulted: tempfile.TemporaryDirectory[str] | None = None

    def delivery(self) -> list[LayerDelivery]:
        """Return, by layer, the calibrated scales and those that TensorRT-LLM reads its cache with, as the bundle says."""
        carried = [{side: scales.scale for side, scales in layer.items()} for layer in self._scales.layers]
        used = self._described.kv_scales or [1.0] * len(carried)
        return [
            LayerDelivery(given, {Side.KEY: (scale,), Side.VALUE: (scale,)}) for given, scale in zip(carried, used, strict=True)
        ]

    def corrupt_key_scale(self, factor: float) -> None:
        """Multiply the scale that decoding reads the cache with, from the next request on; the codes stay right.

        Keys and values share the scale, so values are read wrong as well. For target=engine a second engine is built.
        """
        if not self.policy.quantized:
            raise UserError(f"kv={self.policy.name}: the cache has no scale to corrupt, so backend=trtllm cannot judge it")
        self._fault *= factor
        self.close()

    def _check_fits(self, prompt: int, tokens: int) -> None:
        limits = self._described
        if prompt > limits.max_input_len or prompt + tokens > limits.max_seq_len:
            raise UserError(
                f"backend.max_seq_len={limits.max_seq_len}, backend.max_input_len={limits.max_input_len}: a prompt of "
                f"{prompt} tokens with {tokens} more does not fit; raise them"
            )

    def _open(self) -> Worker:
        engine = self._described.target == "engine"
        model = self._engine() if engine else self._bundle / CHECKPOINT
        fault = None if engine or self._fault == 1.0 else self._fault
        worker = Worker(self._python, self._described.tensor_parallel_size)
        open_model(
            worker, model, self._timeout_s, EmptyAnswer,
            target=self._described.target, llm_args=self._described.evaluated_with, key_fault=fault,
        )  # fmt: skip
        return worker

    def _engine(self) -> Path:
        """The engine's directory. With a fault, a second engine is built for it."""
        if self._fault == 1.0:
            return self._bundle / ENGINE
        self._faulted = tempfile.TemporaryDirectory(prefix="kvgate-canary-")
        folder = Path(self._faulted.name)
        write_faulted(self._bundle / CHECKPOINT, folder / CHECKPOINT, self._fault)
        prefix = "build_config."
        flags = {key.removeprefix(prefix): v for key, v in self._described.asked.items() if key.startswith(prefix)}
        compile_engine(folder / CHECKPOINT, folder / ENGINE, flags, self._python, self._build_timeout_s)
        return folder / ENGINE
