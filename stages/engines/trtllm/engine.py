"""The engine of TensorRT-LLM."""

from pathlib import Path

from stages.core.errors import UserError
from stages.engines.bundle import BuiltFor, check_built_for
from stages.engines.interpreter.backend import CHECKPOINT
from stages.engines.interpreter.process import Worker
from stages.engines.interpreter.requests import RequestEngine
from stages.engines.trtllm.backend import PROGRAM, TrtllmBundle, require_gpus
from stages.engines.trtllm.build import ENGINE, compile_engine, write_faulted
from stages.engines.trtllm.config import TrtllmConfig
from stages.engines.trtllm.settings import rank_capabilities, rank_environment
from stages.policies.policy import Side
from stages.policies.scales import LayerDelivery


class TrtllmEngine(RequestEngine[TrtllmBundle, TrtllmConfig]):
    def _check_machine(self, bundle: Path) -> None:
        ranks, built_for = self._record.tensor_parallel_size, self._record.built_for
        if self._record.target == "engine":
            capabilities = rank_capabilities("engine", self._interpreter, ranks)
            release = self._interpreter.release
            machine = BuiltFor(library=PROGRAM.library, version=release, compute_capabilities=capabilities)
            check_built_for(bundle, built_for, machine, exactly=True)
        else:
            super()._check_machine(bundle)
        require_gpus(self._interpreter, ranks, "running an engine")

    def delivery(self) -> list[LayerDelivery]:
        """Return, by layer, the calibrated scales and the scales in the bundle, which TensorRT-LLM uses to read its cache."""
        carried = [{side: scales.scale for side, scales in layer.items()} for layer in self._scales.layers]
        used_scales = self._record.kv_scales or [1.0] * len(carried)
        return [
            LayerDelivery(file, {Side.KEY: (scale,), Side.VALUE: (scale,)})
            for file, scale in zip(carried, used_scales, strict=True)
        ]

    def corrupt_key_scale(self, factor: float) -> None:
        """Multiply the scale that reads the cache; values share it and are read wrong, too. target=engine builds another."""
        if not self.policy.quantized:
            raise UserError(f"kv={self.policy.name}: the cache has no scale to corrupt, so backend=trtllm cannot judge it")
        super().corrupt_key_scale(factor)

    def _check_fits(self, prompt: int, tokens: int) -> None:
        if prompt > self._record.max_input_len:
            raise UserError(
                f"backend.max_input_len={self._record.max_input_len}: a prompt of {prompt} tokens does not fit; raise it"
            )
        super()._check_fits(prompt, tokens)

    def _open(self) -> Worker:
        described = self._record
        model = self._engine() if described.target == "engine" else self._bundle / CHECKPOINT
        return self._load_model(
            rank_environment(described.tensor_parallel_size), model,
            target=described.target, llm_args=described.evaluated_with, key_fault=self._fault,
        )  # fmt: skip

    def _engine(self) -> Path:
        """Return the engine's directory. With a planted fault, build a second engine from a faulted checkpoint."""
        if self._fault == 1.0:
            return self._bundle / ENGINE
        faulted = self._checkpoint(write_faulted)
        prefix = "build_config."
        arguments = self._record.arguments.items()
        flags = {key.removeprefix(prefix): value for key, value in arguments if key.startswith(prefix)}
        compile_engine(faulted, faulted.parent / ENGINE, flags, self._interpreter)
        return faulted.parent / ENGINE


load_engine = TrtllmEngine
