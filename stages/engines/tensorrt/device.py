"""The GPU that plans run on: its stream, its captures, and memory as TensorRT wants it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from stages.engines.staging import ALIGNMENT


def aligned(size: int, device: torch.device) -> torch.Tensor:
    """Return `size` bytes (at least one) of memory that starts at a multiple of ALIGNMENT."""
    memory = torch.empty(max(1, size) + ALIGNMENT, dtype=torch.uint8, device=device)
    first = -memory.data_ptr() % ALIGNMENT
    return memory[first : first + max(1, size)]


class Device(Protocol):
    """The device of the tensors, and the stream that everything runs on."""

    torch_device: torch.device

    @property
    def stream(self) -> int:
        """CUDA's handle of the stream."""
        ...

    def running(self) -> Any:
        """Return a context manager in which torch launches on the stream."""
        ...

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record what `work` launches, without running it, and return a function that replays it."""
        ...


class CudaDevice:
    """The current GPU, with a stream of its own: on the default stream TensorRT synchronizes the whole device."""

    def __init__(self) -> None:
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        self._stream = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]

    @property
    def stream(self) -> int:
        handle: int = self._stream.cuda_stream
        return handle

    @contextmanager
    def running(self) -> Iterator[None]:
        with torch.cuda.stream(self._stream):
            yield

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream):
            work()
        return graph.replay
