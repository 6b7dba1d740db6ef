"""Script for llama.cpp's interpreter: runs ggml's own row quantization on the vectors of a file.

    python ggml_rows.py VECTORS.npy ROWS.npz NAME=BYTES ...

VECTORS.npy is float32 (..., D). ROWS.npz gets one uint8 array (..., BYTES) per type name.
"""

import ctypes
import sys
from pathlib import Path

import llama_cpp
import numpy as np


def main(source: str, target: str, *types: str) -> None:
    library = ctypes.CDLL(str(Path(llama_cpp.__file__).parent / "lib" / "libggml-cpu.so"))
    x, rows = np.ascontiguousarray(np.load(source)), {}
    for name, width in (argument.split("=") for argument in types):
        rows[name] = np.zeros((*x.shape[:-1], int(width)), np.uint8)
        write = getattr(library, f"quantize_row_{name}")
        write(ctypes.c_void_p(x.ctypes.data), ctypes.c_void_p(rows[name].ctypes.data), ctypes.c_int64(x.size))
    np.savez(target, **rows)  # type: ignore[arg-type]  # numpy types its own keywords alone


main(*sys.argv[1:])
