"""Reads the tensors and JSON files of an exported checkpoint with numpy alone, without torch or ModelOpt."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open


class ExportMismatch(RuntimeError):
    """An export is not what it declares, or not what the policy says; names the file, the tensor and the mismatch."""


@dataclass
class ExportTensors:
    """Files and dtypes of all tensors of a directory, by name; values are read on demand."""

    directory: Path
    files: dict[str, Path] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)

    @classmethod
    def open(cls, directory: Path, pattern: str) -> "ExportTensors":
        """List the tensors in the files of `directory` whose names match the glob `pattern`."""
        tensors = cls(directory)
        for file in sorted(directory.glob(pattern)):
            try:
                with safe_open(file, framework="np") as source:
                    for name in source.keys():  # noqa: SIM118 (not a dict)
                        tensors.files[name] = file
                        tensors.dtypes[name] = source.get_slice(name).get_dtype()
            except SafetensorError as error:
                raise ExportMismatch(f"{file}: not a safetensors file ({error})") from None
        if not tensors.files:
            raise ExportMismatch(f"{directory}: no tensors in {pattern}")
        return tensors

    def require(self, name: str) -> None:
        """Raise ExportMismatch unless there is a tensor `name`."""
        if name not in self.files:
            raise ExportMismatch(f"{self.directory}: tensor {name} is missing")

    def scale(self, name: str) -> npt.NDArray[np.float32]:
        """Return the values of a scale tensor; ExportMismatch unless they are float32, finite and positive."""
        self.require(name)
        file = self.files[name]
        if self.dtypes[name] != "F32":
            raise ExportMismatch(f"{file}: {name} is {self.dtypes[name]}, a scale must be F32")
        with safe_open(file, framework="np") as source:
            values: npt.NDArray[np.float32] = source.get_tensor(name)
        if values.size == 0 or not np.isfinite(values).all() or not (values > 0).all():
            raise ExportMismatch(f"{file}: {name} holds {values.reshape(-1)[:4]}, a scale must be finite and above 0")
        return values


def read_json(file: Path) -> dict[str, Any]:
    """Return the JSON object in `file`; ExportMismatch when there is none."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError) as error:
        raise ExportMismatch(f"{file}: cannot be read ({error})") from None
    if not isinstance(content, dict):
        raise ExportMismatch(f"{file}: must hold a JSON object")
    return content
