"""The engine of TensorRT-LLM."""

from pathlib import Path

from pipeline.core.errors import UserError
from pipeline.core.kv import KVPolicy, Side
from pipeline.core.records import LayerDelivery
from pipeline.core.scales import KVScales
from stages.engines.bundle import BuiltFor, check_built_for
from stages.engines.interpreter.bundle import CHECKPOINT, open_bundle
from stages.engines.interpreter.process import Interpreter, Worker, probe
from stages.engines.interpreter.requests import RequestEngine
from stages.engines.trtllm.build import ENGINE, TrtllmBundle, compile_engine
from stages.engines.trtllm.checkpoint import write_faulted
from stages.engines.trtllm.config import TrtllmConfig
from stages.engines.trtllm.library import PROGRAM, rank_capabilities, rank_environment, require_gpus


def load_engine(bundle: Path, config: TrtllmConfig) -> "TrtllmEngine":
    """Load a bundle that build_bundle wrote; TensorRT-LLM itself starts with the first request.

    Raises:
        UserError: A file is missing or was altered.
        MissingRequirement: This machine cannot run the engine.
    """
    described, policy, scales = open_bundle(bundle, TrtllmBundle, config.name)
    interpreter, ranks = probe(PROGRAM, config.python), described.tensor_parallel_size
    if described.target == "engine":
        capabilities = rank_capabilities(interpreter, ranks)
        machine = BuiltFor(library=PROGRAM.library, version=interpreter.release, compute_capabilities=capabilities)
        check_built_for(bundle, described.built_for, machine, exactly=True)
    else:
        interpreter.require_release(bundle, described.built_for)
    require_gpus(interpreter, ranks, "running an engine")
    return TrtllmEngine(bundle, described, policy, scales, interpreter, config)


class TrtllmEngine(RequestEngine):
    """Requests to TensorRT-LLM."""

    length_key = "max_seq_len"

    def __init__(
        self,
        bundle: Path,
        described: TrtllmBundle,
        policy: KVPolicy,
        scales: KVScales,
        interpreter: Interpreter,
        config: TrtllmConfig,
    ) -> None:
        super().__init__(bundle, described, policy, interpreter, config)
        self._described, self._scales, self._build_timeout_s = described, scales, config.build_timeout_s
        self._static_scale_bytes = 2 * 4 * len(described.kv_scales)  # a float32 and its reciprocal

    def delivery(self) -> list[LayerDelivery]:
        """Return, by layer, the calibrated scales and those that TensorRT-LLM reads its cache with, as the bundle says."""
        carried = [{side: scales.scale for side, scales in layer.items()} for layer in self._scales.layers]
        used = self._described.kv_scales or [1.0] * len(carried)
        return [
            LayerDelivery(given, {Side.KEY: (scale,), Side.VALUE: (scale,)}) for given, scale in zip(carried, used, strict=True)
        ]

    def corrupt_key_scale(self, factor: float) -> None:
        """Let the cache be read with `factor` times the right scale, from the next request on; the codes stay right.

        Keys and values share the scale, so values are read wrong as well. For target=engine a second engine is built.
        """
        if not self.policy.quantized:
            raise UserError(f"kv={self.policy.name}: the cache has no scale to corrupt, so backend=trtllm cannot judge it")
        super().corrupt_key_scale(factor)

    def _check_fits(self, prompt: int, tokens: int) -> None:
        if prompt > self._described.max_input_len:
            raise UserError(
                f"backend.max_input_len={self._described.max_input_len}: a prompt of {prompt} tokens does not fit; raise it"
            )
        super()._check_fits(prompt, tokens)

    def _open(self) -> Worker:
        described = self._described
        fault = None if self._fault == 1.0 else self._fault
        if described.target == "engine":
            model, fault = self._engine(), None
        else:
            model = self._bundle / CHECKPOINT
        return self._opened(
            rank_environment(described.tensor_parallel_size), model,
            target=described.target, llm_args=described.evaluated_with, key_fault=fault,
        )  # fmt: skip

    def _engine(self) -> Path:
        """The engine's directory. With a fault, a second engine is built for it."""
        if self._fault == 1.0:
            return self._bundle / ENGINE
        faulted, prefix = self._checkpoint(), "build_config."
        asked = self._described.arguments.items()
        flags = {key.removeprefix(prefix): value for key, value in asked if key.startswith(prefix)}
        compile_engine(faulted, faulted.parent / ENGINE, flags, self._interpreter.python, self._build_timeout_s)
        return faulted.parent / ENGINE

    def _write_faulted(self, checkpoint: Path, out: Path) -> None:
        write_faulted(checkpoint, out, self._fault)
