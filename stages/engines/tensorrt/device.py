"""The GPU that plans run on: its stream, and its captures."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class Device:
    """The current GPU, with a stream of its own: on the default stream TensorRT synchronizes the whole device."""

    def __init__(self) -> None:
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        self._stream = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]

    @property
    def stream(self) -> int:
        """CUDA's handle of the stream."""
        handle: int = self._stream.cuda_stream
        return handle

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let torch launch on the stream within this context."""
        with torch.cuda.stream(self._stream):
            yield

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record what `work` launches, without running it, and return a function that replays it."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream):
            work()
        return graph.replay
