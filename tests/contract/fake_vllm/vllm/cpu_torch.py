"""As much of torch as the worker asks for what this machine is."""

from typing import Any

import vllm

__version__ = "2.13.0+cpu"


class cpu:
    @staticmethod
    def _is_avx512_supported() -> bool:
        return vllm.MODE != "no avx512"

    @staticmethod
    def _is_amx_tile_supported() -> bool:
        return False


def tensor(values: Any) -> Any:
    return values


class cuda:
    @staticmethod
    def device_count() -> int:
        return 0
