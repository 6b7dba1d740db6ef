"""A plan on a GPU: tensors bound by address, an execution context per shape, and decode steps as CUDA graphs.

A captured graph contains the addresses and the shape of its capture, and becomes invalid with its context. So every shape has
its own context, inputs and outputs, and `shapes.bucket` keeps the number of shapes small. All contexts share one activation
memory, because everything runs on one stream. The host fills one buffer before a run and waits once for its results.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from stages.engines.onnx.bundle import NOT_FINITE
from stages.engines.staging import ALIGNMENT, StagedInputs, StepResults, allocate_stacked
from stages.engines.tensorrt.bundle import GraphTensor
from stages.engines.tensorrt.library import Library
from stages.engines.tensorrt.shapes import pad

DTYPES = {
    "FLOAT": torch.float32,
    "HALF": torch.float16,
    "BF16": torch.bfloat16,
    "INT8": torch.int8,
    "INT32": torch.int32,
    "INT64": torch.int64,
    "FP8": torch.uint8,
}
"""torch's type by the name of TensorRT's DataType. FP8 E4M3 codes are bytes, because torch has few operators for float8."""


class CudaDevice:
    """The current GPU and a separate stream. On the default stream TensorRT would synchronize the whole device."""

    def __init__(self) -> None:
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        self._stream = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]

    @property
    def stream(self) -> int:
        handle: int = self._stream.cuda_stream
        return handle

    @contextmanager
    def running(self) -> Iterator[None]:
        """Make torch launch on the stream within this context."""
        with torch.cuda.stream(self._stream):
            yield

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record the launches of `work` without running them, and return a function that replays them."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream):
            work()
        return graph.replay


class PlanStep:
    """A plan at one shape: its context, its inputs and outputs, and its CUDA graph."""

    def __init__(self, session: "PlanSession", sizes: Mapping[str, int]) -> None:
        self._session = session
        buffers = {name: tensor for name, tensor in session.inputs.items() if name not in session.bound}
        sections = {name: (DTYPES[t.dtype], session.shape(t, sizes)) for name, t in buffers.items()}
        self._staged = StagedInputs(sections, session.device.torch_device)
        self.inputs = self._staged.tensors
        self.outputs: dict[str, torch.Tensor] = {}
        self.families: list[torch.Tensor] = []
        """Stacked outputs (number of outputs, *shape), in the order of `session.families`."""
        for names in session.families:
            first = session.outputs[names[0]]
            shape, kind = session.shape(first, sizes), DTYPES[first.dtype]
            self.families.append(allocate_stacked(len(names), shape, kind, session.device.torch_device))
            self.outputs |= dict(zip(names, self.families[-1], strict=True))
        for name, t in session.outputs.items():
            if name not in self.outputs:
                self.outputs[name] = torch.zeros(
                    session.shape(t, sizes), dtype=DTYPES[t.dtype], device=session.device.torch_device
                )
        self._results = StepResults(self.outputs["logits"], self.outputs[NOT_FINITE])
        self._context = session.context()
        bindings = session.bound | {name: self.inputs[name] for name in buffers}
        for name, tensor in bindings.items():
            shape = tuple(tensor.shape)
            session.check(self._context.set_input_shape(name, shape), f"shape {shape} of {name}")
        for name, tensor in (bindings | self.outputs).items():
            session.check(self._context.set_tensor_address(name, tensor.data_ptr()), f"the address of {name}")
        missing = self._context.infer_shapes()
        session.check(not missing, f"inputs without a shape: {missing}")
        for name, tensor in self.outputs.items():
            shape = tuple(self._context.get_tensor_shape(name))
            session.check(shape == tuple(tensor.shape), f"output {name} of {shape}, expected {tuple(tensor.shape)}")
        self._runs = 0
        self.replay: Callable[[], None] | None = None

    def put(self, name: str, values: npt.NDArray[np.generic]) -> None:
        """Set an input, padded to its shape. Does nothing if the plan does not read the input."""
        if name in self._staged.arrays:
            array = self._staged.arrays[name]
            array[...] = pad(values, array.shape)

    def upload(self) -> None:
        self._staged.upload()

    def read(self) -> list[npt.NDArray[np.generic]]:
        """Wait for the device once and return the logits and the graph's check, in arrays that the next call overwrites."""
        return self._results.read()

    def run(self) -> None:
        """Run once. A shape's first run compiles and allocates; the second is captured if `PlanSession.captures` allows it."""
        if self.replay is None and self._runs and self._session.captures(self._context):
            self.replay = self._session.device.capture(self._enqueue)
        self._runs += 1
        (self.replay or self._enqueue)()

    def _enqueue(self) -> None:
        session = self._session
        session.check(self._context.execute_async_v3(session.device.stream), "a run")


class PlanSession:
    """A deserialized plan, the tensors that are bound for all shapes, and the steps by shape."""

    def __init__(
        self,
        library: Library,
        engine: Any,
        device: CudaDevice,
        inputs: list[GraphTensor],
        outputs: list[GraphTensor],
        *,
        memory: torch.Tensor,
        bound: Mapping[str, torch.Tensor],
        families: Sequence[Sequence[str]],
        captured: bool,
    ) -> None:
        """Open a plan. `bound`: tensors whose addresses never change. `families`: names of the outputs to stack."""
        assert memory.data_ptr() % ALIGNMENT == 0, f"TensorRT wants memory aligned to {ALIGNMENT} bytes"
        self.library, self.engine, self.device, self.captured = library, engine, device, captured
        self.families, self._memory = families, memory
        # The builder may have removed unused inputs.
        names = {engine.get_tensor_name(i) for i in range(engine.num_io_tensors)}
        self.inputs = {tensor.name: tensor for tensor in inputs if tensor.name in names}
        self.outputs = {tensor.name: tensor for tensor in outputs}
        self.bound = {name: tensor for name, tensor in bound.items() if name in self.inputs}
        self._steps: dict[tuple[tuple[str, int], ...], PlanStep] = {}
        self._compiled: Any = None
        """Kernels that TensorRT for RTX compiled for a context. Contexts of other shapes reuse them."""

    def step(self, **sizes: int) -> PlanStep:
        key = tuple(sorted(sizes.items()))
        if key not in self._steps:
            self._steps[key] = PlanStep(self, sizes)
        return self._steps[key]

    def context(self) -> Any:
        """Return a new execution context. All contexts share one activation memory, so only one may run at a time."""
        trt = self.library.trt
        config = self.engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        if self.library.name == "tensorrt_rtx":
            # By default TensorRT for RTX compiles in the background and runs other kernels until then. Equal calls could return
            # different logits, and a graph that was captured early would keep the slow kernels.
            eager = trt.DynamicShapesKernelSpecializationStrategy.EAGER
            config.dynamic_shapes_kernel_specialization_strategy = eager
            if self._compiled is None:
                self._compiled = config.create_runtime_cache()
            self.check(config.set_runtime_cache(self._compiled), "a runtime cache")
        context = self.engine.create_execution_context(config)
        self.check(context is not None, "an execution context")
        context.set_device_memory(self._memory.data_ptr(), self._memory.nbytes)
        return context

    def captures(self, context: Any) -> bool:
        """Return whether to capture the context's runs. Only TensorRT for RTX can report that a context is not capturable."""
        if self.captured and self.library.name == "tensorrt_rtx":
            return bool(context.is_stream_capturable(self.device.stream))
        return self.captured

    def shape(self, tensor: GraphTensor, sizes: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(sizes[dim] if isinstance(dim, str) else dim for dim in tensor.shape)

    def check(self, success: bool, action: str) -> None:
        """Raise RuntimeError with the reason from TensorRT's log unless `success`."""
        if not success:
            raise RuntimeError(
                f"{self.library.title} {self.library.version} refuses {action}: {'; '.join(self.library.take_errors())}"
            )
