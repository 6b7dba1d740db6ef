"""The part of TensorRT's runtime that the engine calls, on top of ONNX Runtime: same graph, same addresses, no GPU.

It is as strict as TensorRT: shapes must lie in the profile, every tensor needs an address before a run, activation memory
must be given, and output shapes follow from the input shapes.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy.typing as npt
import onnx
import onnxruntime as ort
import tensorrt_rtx
import torch

from stages.core.records import no_progress
from stages.engines.base import Mode
from stages.engines.onnx.weights import cast_nodes
from stages.engines.tensorrt.build import build_bundle
from stages.engines.tensorrt.bundle import GraphTensor, PlanRecord
from stages.engines.tensorrt.library import Library
from stages.engines.tensorrt.session import CudaDevice
from stages.policies.policy import KVPolicy

trt = SimpleNamespace(
    ExecutionContextAllocationStrategy=tensorrt_rtx.ExecutionContextAllocationStrategy,
    DynamicShapesKernelSpecializationStrategy=tensorrt_rtx.DynamicShapesKernelSpecializationStrategy,
    __version__="1.7.1.116",
)
LIBRARY = Library("tensorrt_rtx", trt, SimpleNamespace(lines=[]))
STREAM = 0x5EED


def make_plans(onnx_bundle: Path, out: Path, policy: KVPolicy, **changes: Any) -> Path:
    """Build the plans of a bundle of the random Llama, for SM 8.9 unless `changes` differ."""
    out.mkdir()
    scales = onnx_bundle.with_name(f"{onnx_bundle.name}_scales.json")
    options: dict[str, Any] = {"library": "tensorrt_rtx", "max_batch": 4, "max_tokens": 512, "targets": [89], **changes}
    build_bundle(onnx_bundle, out, policy=policy, scales=scales, progress=no_progress, **options)
    return out


class FakeDevice(CudaDevice):
    """The CPU as a stand-in for a GPU; counts captures and replays."""

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self.captured = self.replayed = 0

    @property
    def stream(self) -> int:
        return STREAM

    @contextmanager
    def running(self) -> Iterator[None]:
        yield

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        self.captured += 1

        def replay() -> None:
            self.replayed += 1
            work()

        return replay


def computed_with(model: onnx.ModelProto) -> dict[str, npt.NDArray[Any]]:
    """Return a graph's constants by the names that the computation uses."""
    widening = cast_nodes(model.graph)
    initializers = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    return {widening[name].output[0] if name in widening else name: value for name, value in initializers.items()}


class FakeCudaEngine:
    """A fake ICudaEngine of one graph of a bundle."""

    device_memory_size_v2 = 1 << 12

    def __init__(self, graph: Path, record: PlanRecord, mode: Mode, policy: KVPolicy) -> None:
        self.tensors = [*record.inputs[mode], *record.outputs[mode]]
        self.inputs = {t.name: t for t in record.inputs[mode]}
        self.profile = record.limits(policy).ranges(mode)
        # If weights were inputs, ONNX Runtime would sum in another order, and codes of new tokens would round to
        # neighbours. So weights are constants here.
        self.session = ort.InferenceSession(str(graph), providers=["CPUExecutionProvider"])
        model = onnx.load(graph)
        self.weights = {weight.name for weight in record.weights}
        self.types = {v.name: v.type.tensor_type.elem_type for v in [*model.graph.input, *model.graph.output]}
        self.contexts: list[FakeContext] = []
        self.capturable = True

    @property
    def num_io_tensors(self) -> int:
        return len(self.tensors)

    def get_tensor_name(self, index: int) -> str:
        return self.tensors[index].name

    def create_runtime_config(self) -> Any:
        config = SimpleNamespace(strategy=None, dynamic_shapes_kernel_specialization_strategy=None)
        config.set_execution_context_allocation_strategy = lambda strategy: setattr(config, "strategy", strategy)
        config.create_runtime_cache = object
        config.set_runtime_cache = lambda cache: cache is not None
        return config

    def create_execution_context(self, config: Any) -> "FakeContext":
        assert config.strategy == trt.ExecutionContextAllocationStrategy.USER_MANAGED
        assert config.dynamic_shapes_kernel_specialization_strategy == trt.DynamicShapesKernelSpecializationStrategy.EAGER
        self.contexts.append(FakeContext(self))
        return self.contexts[-1]


class FakeContext:
    """A fake IExecutionContext."""

    def __init__(self, engine: FakeCudaEngine) -> None:
        self.engine = engine
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.memory = 0
        self.runs = 0

    def set_device_memory(self, memory: int, size: int) -> None:
        assert memory
        self.memory = size

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        described = self.engine.inputs[name]
        for dim, size in zip(described.shape, shape, strict=True):
            if isinstance(dim, int):
                if dim != size:
                    return False
                continue
            bounds = self.engine.profile[dim]
            if not bounds.smallest <= size <= bounds.largest:
                return False
        self.shapes[name] = shape
        return True

    def set_tensor_address(self, name: str, memory: int) -> bool:
        self.addresses[name] = memory
        return memory != 0

    def infer_shapes(self) -> list[str]:
        return [name for name in self.engine.inputs if name not in self.shapes]

    @property
    def sizes(self) -> dict[str, int]:
        """Current size of each dimension. Asserts that equally named dimensions have equal sizes."""
        sizes: dict[str, int] = {}
        for name, shape in self.shapes.items():
            for dim, size in zip(self.engine.inputs[name].shape, shape, strict=True):
                assert not isinstance(dim, str) or sizes.setdefault(dim, size) == size, f"{dim} of {name}"
        return sizes

    def _shape(self, tensor: GraphTensor) -> tuple[int, ...]:
        sizes = self.sizes
        return tuple(sizes[dim] if isinstance(dim, str) else dim for dim in tensor.shape)

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return self._shape(next(t for t in self.engine.tensors if t.name == name))

    def is_stream_capturable(self, stream: int) -> bool:
        assert stream == STREAM
        return self.engine.capturable

    def execute_async_v3(self, stream_handle: int) -> bool:
        assert stream_handle == STREAM
        assert self.memory >= self.engine.device_memory_size_v2
        binding = self.engine.session.io_binding()
        for tensor in self.engine.tensors:
            if tensor.name in self.engine.weights:
                continue
            bind = binding.bind_input if tensor.name in self.engine.inputs else binding.bind_output
            kind, shape = self.engine.types[tensor.name], self._shape(tensor)
            bind(tensor.name, "cpu", 0, kind, shape, self.addresses[tensor.name])
        self.engine.session.run_with_iobinding(binding)
        self.runs += 1
        return True
