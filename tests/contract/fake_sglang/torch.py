"""The part of torch that the fake SGLang and the worker need, on numpy. The real torch takes seconds to import."""

from types import SimpleNamespace
from typing import Any

import numpy as np

cuda = SimpleNamespace()


class Tensor(np.ndarray):  # type: ignore[type-arg]
    def detach(self) -> "Tensor":
        return self

    float = cpu = detach

    def fill_(self, value: Any) -> None:
        self.fill(value)

    def numpy(self) -> Any:
        return np.asarray(self)
