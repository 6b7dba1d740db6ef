"""Emulator of the kernels' inline PTX in numpy, for Triton's interpreter, which cannot run PTX.

It implements only the instructions that the kernels use; any other raises. Semantics follow NVIDIA's PTX ISA, section
"Instruction Set".
"""

import re
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

Register = npt.NDArray[Any]


def _prmt(a: Register, b: Register, selector: Register) -> Register:
    pool = np.stack([(word >> np.uint32(8 * i)) & np.uint32(0xFF) for word in (a, b) for i in range(4)])
    out = np.zeros(pool.shape[1], np.uint32)
    for i in range(4):
        nibble = int(selector[0] >> 4 * i) & 15
        byte = pool[nibble & 7]
        if nibble & 8:  # replicate the byte's sign bit into all its bits
            byte = np.where(byte & np.uint32(0x80), np.uint32(0xFF), np.uint32(0))
        out |= byte << np.uint32(8 * i)
    return out


def _lop3(a: Register, b: Register, c: Register, table: Register) -> Register:
    out = np.zeros_like(a)
    for row in range(8):
        if int(table[0]) >> row & 1:
            terms = [word if row >> bit & 1 else ~word for word, bit in ((a, 2), (b, 1), (c, 0))]
            out |= terms[0] & terms[1] & terms[2]
    return out


def _halves(operation: Callable[..., Register]) -> Callable[..., Register]:
    """Turn an operation on float64 into an operation on pairs of float16 that rounds once."""

    def apply(*words: Register) -> Register:
        return operation(*(word.view(np.float16).astype(np.float64) for word in words)).astype(np.float16).view(np.uint32)

    return apply


OPERATIONS: dict[str, Callable[..., Register]] = {
    "mov.b32": lambda a: a,
    "and.b32": np.bitwise_and,
    "or.b32": np.bitwise_or,
    "xor.b32": np.bitwise_xor,
    "shr.u32": np.right_shift,
    "shl.b32": np.left_shift,
    "prmt.b32": _prmt,
    "lop3.b32": _lop3,
    "add.f16x2": _halves(lambda a, b: a + b),
    "mul.f16x2": _halves(lambda a, b: a * b),
    "fma.rn.f16x2": _halves(lambda a, b, c: a * b + c),
    "cvt.rn.f16x2.e4m3x2": lambda a: a.view(ml_dtypes.float8_e4m3fn).astype(np.float16).view(np.uint32),
}
SIZES = {"h": np.uint16, "r": np.uint32}


class Results:
    """Return value of the interpreter's builder: `get_result(i)` is the i-th result."""

    def __init__(self, results: list[TensorHandle]) -> None:
        self.get_result = results.__getitem__


def create_inline_asm(
    _: object, asm: str, constraints: str, values: list[TensorHandle], types: list[tl.dtype], __: bool, pack: int
) -> Results:
    """Replace triton.runtime.interpreter.InterpreterBuilder.create_inline_asm."""
    shape = values[0].data.shape
    registers: dict[str, Register] = {}
    letters = [letter.strip() for letter in constraints.split(",")]
    outputs = sum(letter.startswith("=") for letter in letters)
    inputs = []
    for value in values:
        # Groups of `pack` neighbours share registers of up to four bytes.
        rows = np.ascontiguousarray(value.data).reshape(-1, pack).view(np.uint8)
        inputs += [np.ascontiguousarray(rows[:, i : i + 4]).view(np.uint32).ravel() for i in range(0, rows.shape[1], 4)]
    assert len(inputs) == len(letters) - outputs
    for number, register in enumerate(inputs):
        registers[f"${outputs + number}"] = register
    _run(asm, registers, len(inputs[0]))
    results_iterator = iter([registers[f"${i}"].astype(SIZES[letters[i][1]]) for i in range(outputs)])
    results = []
    for dtype in types:
        element = {tl.float16: np.float16, tl.int32: np.int32}[dtype.scalar]
        size = np.dtype(element).itemsize * pack
        parts: list[Register] = []
        while sum(part.itemsize for part in parts) < size:
            parts.append(next(results_iterator))
        rows = np.concatenate([part[:, None].view(np.uint8) for part in parts], axis=1)
        results.append(TensorHandle(np.ascontiguousarray(rows).view(element).reshape(shape), dtype.scalar))
    assert next(results_iterator, None) is None
    return Results(results)


def _run(asm: str, registers: dict[str, Register], count: int) -> None:
    """Execute the statements of a block. Every register is an array of `count` elements."""

    def read(name: str) -> Register:
        return registers[name] if name in registers else np.full(count, int(name, 0), np.uint32)

    for statement in asm.strip().strip("{}").split(";"):
        line = " ".join(statement.split())
        if not line or line.startswith(".reg"):
            continue
        name, _, rest = line.partition(" ")
        target, *sources = re.findall(r"\{[^}]*\}|[^,\s]+", rest)
        if name == "mov.b32" and target.startswith("{"):
            low, high = target.strip("{} ").replace(" ", "").split(",")
            word = read(sources[0]).astype(np.uint32)
            registers[low], registers[high] = (word & 0xFFFF).astype(np.uint16), (word >> 16).astype(np.uint16)
        else:
            registers[target] = OPERATIONS[name](*map(read, sources))
