"""The engine that runs TensorRT plans on a GPU. Steps and pages work as in the ONNX engine."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from stages.core.errors import UserError
from stages.core.memory import GIB
from stages.core.records import StoredCopy
from stages.engines.base import Mode
from stages.engines.bundle import BuiltFor, check_built_for, open_bundle
from stages.engines.gpu import require_gpu
from stages.engines.interface import Logits
from stages.engines.paged.engine import PagedEngine
from stages.engines.staging import allocate_aligned
from stages.engines.tensorrt.bundle import PLANS, PlanRecord, load_weights
from stages.engines.tensorrt.library import Library, Name, load
from stages.engines.tensorrt.pool import PlanPool
from stages.engines.tensorrt.session import CudaDevice, PlanSession
from stages.engines.tensorrt.shapes import PlanLimits, bucket
from stages.policies.policy import KVPolicy, KVShape, Side
from stages.policies.scales import KVScales


def load_engine(bundle: Path, *, library: Name) -> "PlanEngine":
    described, policy, scales = open_bundle(bundle, PlanRecord, library)
    trt = load(library)
    check_built_for(bundle, described.built_for, this_machine(trt, described.built_for))
    runtime = trt.trt.Runtime(trt.log)
    plans = {}
    for mode, name in PLANS.items():
        plans[mode] = runtime.deserialize_cuda_engine((bundle / name).read_bytes())
        if plans[mode] is None:
            raise UserError(f"{bundle / name}: {trt.title} {trt.version} cannot load it: {'; '.join(trt.take_errors())}")
    return PlanEngine(bundle, described, policy, scales, plans, trt, CudaDevice())


def this_machine(library: Library, built: BuiltFor) -> BuiltFor:
    """Return the library and the GPU of this machine. Raises MissingRequirement if torch cannot use a GPU."""
    capabilities = " or ".join(built.compute_capabilities)
    needs = f"{library.title} {built.version} and a GPU of compute capability (SM) {capabilities}"
    gpu = require_gpu(f"backend={library.name}", f"run the plans on a machine with {needs}")
    return BuiltFor(library=library.title, version=library.version, compute_capabilities=[gpu.capability])


class PlanEngine(PagedEngine):
    """The engine on TensorRT. The graphs read the pool in place, and tokens are copied to it on the device."""

    pool: PlanPool

    def __init__(
        self,
        directory: Path,
        bundle: PlanRecord,
        policy: KVPolicy,
        scales: KVScales,
        plans: Mapping[Mode, Any],
        library: Library,
        device: CudaDevice,
    ) -> None:
        """Allocate weights, pool and activations for `plans` (ICudaEngines). Raises UserError if GPU memory is too small."""
        limits = bundle.limits(policy)
        self._device, self._limits = device, limits
        activations = max(int(plan.device_memory_size_v2) for plan in plans.values())
        with device.running():
            try:
                weights = load_weights(directory, bundle.weights, device.torch_device)
                pool = PlanPool(limits, bundle.shape, device.torch_device)
                memory = allocate_aligned(activations, device.torch_device)
            except torch.OutOfMemoryError as error:
                raise _too_large(limits, bundle.shape, activations) from error
            super().__init__(bundle.model.vocab_size, scales, pool)
            self.prefill_chunk = limits.chunk
            self.max_sequences = self.max_batch = limits.max_batch
            self.max_tokens = limits.max_tokens
            bound = {**pool.tensors, **self._constants, **weights}
        self._sessions = {
            mode: PlanSession(
                library, plan, device, bundle.inputs[mode], bundle.outputs[mode],
                memory=memory, bound=bound, families=pool.families, captured=mode == "decode",
            )
            for mode, plan in plans.items()
        }  # fmt: skip
        """Sessions by mode. Only decode steps are captured, because a prompt is prefilled once."""

    def fork(self, sequence: int) -> int:
        with self._device.running():  # on the stream of the next step, so that pages are copied first
            return super().fork(sequence)

    def corrupt_key_scale(self, factor: float) -> None:
        with self._device.running():
            super().corrupt_key_scale(factor)

    def stored(self, sequence: int) -> list[dict[Side, StoredCopy]]:
        with self._device.running():  # on the same stream, so after the steps that wrote the tokens
            return super().stored(sequence)

    def _run(self, mode: Mode, handles: Sequence[int], ids: npt.NDArray[np.int64]) -> Logits:
        """Run a step like PagedEngine's `_run`, at a padded shape.

        Padding rows have an empty cache. Padding of the page table is masked. Padding tokens come after their row's tokens,
        which therefore ignore them.
        """
        batch, columns = ids.shape
        tables = self.pool.tables(handles)
        positions = tables["lengths"][:, None].astype(np.int64) + np.arange(columns)
        inputs = {"input_ids": ids, "position_ids": positions, "last": np.full(batch, columns - 1), **tables}
        with self._device.running():
            step = self._sessions[mode].step(**self._sizes(mode, batch, columns, tables["page_table"].shape[1]))
            for name, values in inputs.items():
                step.put(name, values)
            step.upload()
            step.run()
            logits, sums = (rows[:batch].astype(np.float32) for rows in step.read())  # copies: the next step overwrites them
            self._check_finite(sums[:, :, :columns])
            self.pool.store(handles, columns, step.families, self._faults)
        return logits

    def _sizes(self, mode: Mode, batch: int, tokens: int, pages: int) -> dict[str, int]:
        limits = self._limits
        return {
            "B": bucket(batch, limits.max_batch),
            "S": 1 if mode == "decode" else bucket(tokens, limits.chunk),
            "P": bucket(pages, limits.sequence_pages),
            "Y": max(1, limits.sequence_window_pages),
        }


def _too_large(limits: PlanLimits, shape: KVShape, activations: int) -> UserError:
    policy = limits.policy
    pool = policy.pool_bytes(shape, limits.pages) + policy.exact_bytes(shape, limits.max_batch)
    return UserError(
        f"backend.max_batch={limits.max_batch}, backend.max_tokens={limits.max_tokens}: the GPU's memory is too small for the "
        f"cache ({pool / GIB:.1f} GiB) and the plans' activations ({activations / GIB:.1f} GiB) in addition to the weights; "
        "lower one of the two keys and build again, or free GPU memory"
    )
