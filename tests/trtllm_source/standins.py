"""Stand-ins that let TensorRT-LLM's Python run without compiled parts, a GPU, or packages that these tests do not need.

An interpreter with this folder on its path runs the modules of TRTLLM_SRC. Missing packages that they import are replaced
by permissive stand-ins. The packages in BARE are imported without running their `__init__`, which would import everything.
"""

import functools
import importlib
import importlib.abc
import importlib.machinery
import os
import sys
import types
from pathlib import Path
from typing import Any

SOURCE = os.environ["TRTLLM_SRC"]
SM = (9, 0)
"""Compute capability of the GPU that torch.cuda pretends to show."""
PACKAGES = ("llmapi", "_torch", "_tensorrt_engine", "runtime", "serve", "executor", "inputs")
OF_TORCH = ("pyexecutor", "models", "modules", "distributed", "attention_backend", "speculative")
BARE = ("tensorrt_llm", *(f"tensorrt_llm.{name}" for name in PACKAGES), *(f"tensorrt_llm._torch.{name}" for name in OF_TORCH))
ARGUMENTS = ("KvCacheConfig", "TorchLlmArgs", "SchedulerConfig", "DynamicBatchConfig", "CapacitySchedulerPolicy")
ELSEWHERE = {
    "SamplingParams": "tensorrt_llm.sampling_params",
    "logger": "tensorrt_llm.logger",
    "__version__": "tensorrt_llm.version",
    "BuildConfig": "tensorrt_llm.builder",
    **dict.fromkeys(ARGUMENTS, "tensorrt_llm.llmapi.llm_args"),
}
"""Names that a package in BARE re-exports -> the modules that define them."""


class Kind(type):
    """A class that has any attribute, and takes part in flags, ranges and type unions."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(cls, name, stand_in(f"{cls.__name__}.{name}"))
        return cls.__dict__[name]

    def __dir__(cls) -> list[str]:
        return []

    def __iter__(cls) -> Any:
        return iter(())

    def __len__(cls) -> int:
        return 0

    def __int__(cls) -> int:
        return 0

    __index__ = __int__

    def __or__(cls, other: object) -> Any:
        return cls

    __ror__ = __and__ = __getitem__ = __or__

    def __lshift__(cls, other: object) -> int:
        return 1

    __rlshift__ = __lshift__

    def __lt__(cls, other: object) -> bool:
        return False


class TrtllmStandIn(metaclass=Kind):
    """An object with any attribute that can be called, entered, and used as a decorator."""

    def __init__(self, *_: object, **arguments: object) -> None:
        self.__dict__.update(arguments)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return stand_in(name)()

    def __call__(self, *arguments: Any, **options: object) -> Any:
        return arguments[0] if len(arguments) == 1 and callable(arguments[0]) and not options else self

    @classmethod
    def __get_pydantic_core_schema__(cls, *_: object) -> Any:
        return {"type": "any"}

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def __iter__(self) -> Any:
        return iter(())


def stand_in(name: str) -> Any:
    return Kind(name, (TrtllmStandIn,), {"__members__": {}})


class TrtllmModule(types.ModuleType):
    """A module that has any attribute."""

    __version__ = "10.14.1"

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, stand_in(name))
        return self.__dict__[name]


class TrtllmFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds stand-ins for missing packages that a module of the source tree imports. It is the last finder."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:  # noqa: ARG002
        frame = sys._getframe(1)
        while "importlib" in frame.f_code.co_filename and frame.f_back is not None:
            frame = frame.f_back
        parent = sys.modules.get(name.rpartition(".")[0])
        if isinstance(parent, TrtllmModule) or frame.f_code.co_filename.startswith(SOURCE):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> Any:
        return TrtllmModule(spec.name)

    def exec_module(self, module: Any) -> None:
        pass


class Bare(types.ModuleType):
    """A package of the source tree whose `__init__` is not run."""

    def __getattr__(self, name: str) -> Any:
        if name in ELSEWHERE:
            return getattr(importlib.import_module(ELSEWHERE[name]), name)
        if name.startswith("__"):
            raise AttributeError(name)
        folder = Path(SOURCE, *self.__name__.split("."), name)
        if folder.is_dir() or folder.with_suffix(".py").is_file():
            return importlib.import_module(f"{self.__name__}.{name}")
        return stand_in(name)


def install() -> None:
    sys.meta_path.append(TrtllmFinder())
    sys.path.append(SOURCE)
    for name in BARE:
        module = Bare(name)
        module.__path__ = [os.path.join(SOURCE, *name.split("."))]
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        sys.modules[name] = module


def show_gpus(capability: tuple[int, int]) -> None:
    """Make torch report GPUs, on which nothing runs, and create CUDA tensors on the CPU instead."""
    import torch

    major, minor = capability
    properties = types.SimpleNamespace(
        major=major, minor=minor, name="stand-in", total_memory=80 << 30, multi_processor_count=132
    )
    shown = {
        "device_count": lambda: int(os.environ.get("KVGATE_GPUS", "1")),
        "get_device_name": lambda *_: "stand-in",
        "get_device_capability": lambda *_: capability,
        "get_device_properties": lambda *_: properties,
        "set_device": lambda *_: None,
    }
    for name, function in shown.items():
        setattr(torch.cuda, name, function)
    missing: dict[Any, dict[str, Any]] = {
        torch: {"compile": _left_out, **{name: _on_the_cpu(getattr(torch, name)) for name in ("ones", "zeros", "empty")}},
        torch.classes: {"trtllm": types.SimpleNamespace()},
        torch.library: {"register_fake": _left_out},
    }
    for holder, names in missing.items():
        for name, value in names.items():
            setattr(holder, name, value)


def _on_the_cpu(function: Any) -> Any:
    return lambda *arguments, **options: function(*arguments, **{**options, "device": "cpu"})


def _left_out(*arguments: Any, **_: object) -> Any:
    """Return a decorator that changes nothing, used with or without arguments."""
    return arguments[0] if arguments and callable(arguments[0]) else lambda function: function


def stop_at_the_network() -> None:
    """Make trtllm-build write an engine without a plan: all steps up to the optimised model are TensorRT-LLM's own."""
    builder: Any = importlib.import_module("tensorrt_llm.builder")
    optimize, build = builder.optimize_model_with_config, builder.build

    class Optimized(Exception):
        pass

    def optimized(model: Any, config: Any) -> None:
        raise Optimized(optimize(model, config), config)

    @functools.wraps(build)
    def built(model: Any, config: Any) -> Any:
        try:
            build(model, config)
        except Optimized as reached:
            model, config = reached.args
        version = importlib.import_module("tensorrt_llm.version").__version__
        return builder.Engine(builder.EngineConfig(model.config, config, version), b"no plan", None)

    builder.optimize_model_with_config, builder.build = optimized, built


def begin() -> None:
    """Prepare this interpreter, before its program starts."""
    install()
    show_gpus(SM)
    if "tensorrt_llm.commands.build" in sys.orig_argv:
        stop_at_the_network()
