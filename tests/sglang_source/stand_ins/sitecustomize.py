"""Stand-ins for compiled packages that SGLang requires, but that a CPU cannot run or that the tests do not need.

Python imports this module at the start of every SGLang process, because its folder is on PYTHONPATH. SGLang's own Python
runs unchanged: on a CPU it computes with PyTorch alone. Every name in a stand-in is a class that accepts everything.
"""

import importlib.abc
import importlib.machinery
import os
import sys
import types
from collections.abc import Sequence
from typing import Any

COMPILED = (
    "llguidance",
    "sentencepiece",
    "sgl_kernel",
    "soundfile",
    "tiktoken",
    "torchaudio",
    "torchvision",
    "tvm_ffi",
    "xgrammar",
)


class AnyName(type):
    """A class that has every attribute."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return make(name)


class SglangStandIn(metaclass=AnyName):
    """An object that can be created, called, inherited from, and used as a decorator."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __init_subclass__(cls, **_: Any) -> None:
        pass

    @classmethod
    def __get_pydantic_core_schema__(cls, *_: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.any_schema()

    def __call__(self, *args: Any, **named: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not named else self


def make(name: str) -> Any:
    return AnyName(name, (SglangStandIn,), {})


class SglangModule(types.ModuleType):
    __path__: Sequence[str] = []
    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return make(name)


class SglangFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] in COMPILED:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return SglangModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def show_gpu(capability: tuple[int, ...]) -> None:
    """Make PyTorch report a GPU, enough for SGLang to resolve its server arguments. Nothing can run on this GPU."""
    import torch

    memory = 80 << 30
    properties = {"major": capability[0], "minor": capability[1], "total_memory": memory, "multi_processor_count": 132}
    answers = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_name": "NVIDIA GPU",
        "get_device_capability": capability,
        "mem_get_info": (memory, memory),
        "get_device_properties": types.SimpleNamespace(name="NVIDIA GPU", **properties),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    torch.version.cuda = "13.0"


sys.meta_path.insert(0, SglangFinder())
if "KVGATE_SHOWN_GPU" in os.environ:
    show_gpu(tuple(map(int, os.environ["KVGATE_SHOWN_GPU"].split("."))))
else:
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
