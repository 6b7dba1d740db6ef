"""The bench of `python -m stages.selftest`: engines of bundles that the pipeline builds here, and TensorRT itself."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from pipeline.artifacts.store import Store
from pipeline.config.compose import plan
from pipeline.core.backends import TorchConfig
from pipeline.core.engine import Engine
from pipeline.core.errors import MissingRequirement
from pipeline.core.kv import KVPolicy
from pipeline.core.redaction import child_environment
from pipeline.run.chain import Chain
from pipeline.run.inputs import check_inputs
from plugins.kv_attention.tensorrt_nodes import NAMESPACE, all_nodes
from stages.engines.oracle.engine import load_engine as load_oracle
from stages.engines.paged.kernel_layout import KernelRefusal, layer_layout
from stages.engines.tensorrt.bundle import PLANS, PlanRecord, open_bundle
from stages.engines.tensorrt.engine import PlanEngine, load_engine
from stages.engines.tensorrt.library import load
from stages.engines.tensorrt.plugin import register
from stages.engines.tensorrt.surgery import PLUGIN_VERSION
from stages.selftest.checks import CheckFailure
from stages.selftest.probes import append_in_place, far_shared_memory

PLUGIN_FREE_PROGRAM = """
import sys
import tensorrt as trt
log = trt.Logger(trt.Logger.ERROR)
engine = trt.Runtime(log).deserialize_cuda_engine(open(sys.argv[1], "rb").read())
assert engine is not None, "the plan does not load"
assert not [name for name in sys.modules if name.startswith(("plugins", "triton"))]
print(engine.num_io_tensors, "inputs and outputs")
"""
"""Loads a plan with TensorRT alone, without importing anything of this project."""


class GpuBench:
    """`checks.Bench` on this machine.

    Args:
        model: model.path of the engines.
        policy: KV policy of the engines, an option of `kv`, and overrides of it.
        workdir: Where the engines are kept.

    Raises:
        MissingRequirement: There is no TensorRT, no GPU, or no CUDA build of torch.
        UserError: No engines can be built of the model or the policy.
    """

    def __init__(self, model: str, policy: Sequence[str], workdir: Path) -> None:
        self.library = load("tensorrt")
        kv = [f"kv={policy[0]}", *policy[1:]]
        overrides = [f"model.path={model}", *kv, f"workdir={workdir}", "backend=tensorrt", "stage=build"]
        self.config = plan([*overrides, "tracking=none"], multirun=False).jobs[0]
        check_inputs(self.config)
        self.chain = Chain(self.config, Store(self.config.work / "artifacts"))

    @property
    def policy(self) -> KVPolicy:
        """The KV policy of the engines."""
        return self.config.kv

    @cached_property
    def bundle(self) -> Path:
        """The bundle of the plans; built first where there is none."""
        return self.chain.bundle(self.config.kv).path

    @property
    def record(self) -> PlanRecord:
        """What bundle.json says of the plans."""
        return open_bundle(self.bundle, "tensorrt")[0]

    def operations(self) -> Mapping[str, bool]:
        register()
        registry = self.library.trt.get_plugin_registry()
        return {node.plugin_id: registry.get_creator(node.name, PLUGIN_VERSION, NAMESPACE) is not None for node in all_nodes()}

    def plugin_nodes(self) -> Sequence[str]:
        return list(self.record.plugins)

    def load_without_plugin(self) -> str:
        command = [sys.executable, "-c", PLUGIN_FREE_PROGRAM, str(self.bundle / PLANS["decode"])]
        result = subprocess.run(command, capture_output=True, text=True, check=False, env=child_environment())
        if result.returncode:
            reason = (result.stderr.strip().splitlines() or ["no reason"])[-1]
            raise CheckFailure(f"the plan does not load without the plugin: {reason}")
        return result.stdout.strip()

    def engine(self, *, cuda_graphs: bool) -> PlanEngine:
        return load_engine(self.bundle, library="tensorrt", cuda_graphs=cuda_graphs)

    def oracle(self) -> Engine:
        config = TorchConfig(name="torch", device="cpu", threads=1)
        return load_oracle(self.chain.bundle(self.config.kv, config).path, threads=1)

    def binding(self, name: str) -> tuple[str, str]:
        engine = self._plan()
        return engine.get_tensor_dtype(name).name, engine.get_tensor_format_desc(name)

    def captured(self, engine: Engine) -> int:
        return cast(PlanEngine, engine).session("decode").replayed_shapes

    def far_shared_memory(self, size: int) -> npt.NDArray[np.float32]:
        return far_shared_memory(self.library, size)

    def append_in_place(self) -> tuple[dict[str, npt.NDArray[np.generic]], dict[str, npt.NDArray[np.generic]]]:
        register()
        info, policy = self.record.model, self.config.kv
        layout = layer_layout(policy, info.shape, 0, info.q_heads)
        if isinstance(layout, KernelRefusal):
            hint = "choose another with --kv, fp8k_int4v for one"
            raise MissingRequirement(f"kv={policy.name}: the plugin does not hold this policy ({layout}); {hint}")
        major, minor = torch.cuda.get_device_capability()
        return append_in_place(self.library, layout, 10 * major + minor)

    def change_shape(self, times: int) -> None:
        session, limits = self._engine.session("decode"), self.record.limits(self.config.kv)
        pages, window_pages = limits.sequence_pages, max(1, limits.sequence_window_pages)
        most = {"B": limits.max_batch, "S": 1, "P": pages, "Y": window_pages}
        with session.device.running():  # The zeros are written before the first run, which is on that stream.
            tensors = session.bound | session.written
            tensors |= {
                name: session.tensor(tensor, most)
                for name, tensor in (session.inputs | session.outputs).items()
                if name not in tensors
            }
        for name, tensor in tensors.items():
            session.check(self._context.set_tensor_address(name, tensor.data_ptr()), f"the address of {name}")
        for turn in range(times):
            sizes = most | {"B": 1 + turn % limits.max_batch, "P": 1 + turn % pages}
            for name, described in session.inputs.items():
                if name not in session.bound:
                    shape = tuple(sizes[d] if isinstance(d, str) else d for d in described.shape)
                    session.check(self._context.set_input_shape(name, shape), f"{name} of shape {shape}")
            session.check(self._context.execute_async_v3(session.device.stream), "a run")
            torch.cuda.synchronize()

    def free_bytes(self) -> int:
        torch.cuda.synchronize()
        return int(torch.cuda.mem_get_info()[0])

    @cached_property
    def _engine(self) -> PlanEngine:
        return load_engine(self.bundle, library="tensorrt", cuda_graphs=False)

    @cached_property
    def _context(self) -> Any:
        """A context that runs every shape, unlike the engine's contexts."""
        session = self._engine.session("decode")
        context = session.context()
        for name, tensor in session.bound.items():
            session.check(context.set_input_shape(name, tuple(tensor.shape)), f"{name} of shape {tuple(tensor.shape)}")
        return context

    def _plan(self) -> Any:
        """The decode plan, deserialized by TensorRT."""
        runtime = self.library.trt.Runtime(self.library.log)
        engine = runtime.deserialize_cuda_engine((self.bundle / PLANS["decode"]).read_bytes())
        if engine is None:
            raise CheckFailure(f"the decode plan does not load: {'; '.join(self.library.take_errors())}")
        return engine
