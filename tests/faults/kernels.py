"""Mutants: the attention kernel compiled from sources with one place changed."""

import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

from faults.fault import Fault
from faults.hooks import SOUND
from stages.engines.onnx import engine as onnx_engine
from stages.engines.onnx.native import compiler

NATIVE = Path(compiler.__file__).parent

Loads = Callable[[], AbstractContextManager[object]]


def kernel(before: str, after: str) -> Loads:
    """Compile the kernel with the text `before`, which must occur exactly once in the sources, replaced by `after`."""

    def compiled(head_dim: int, group: int) -> Path:
        folder = Path(work.name)
        out = folder / "mutant.so"
        if out.exists():
            return out
        texts = {name: (NATIVE / name).read_text(encoding="utf-8") for name in compiler.SOURCES}
        places = sum(text.count(before) for text in texts.values())
        assert places == 1, f"the kernel has {places} places like {before!r}"
        for name, text in texts.items():
            (folder / name).write_text(text.replace(before, after), encoding="utf-8")
        flags = [flag.replace("-O3", "-O1") for flag in compiler.FLAGS]  # compiles in a third of the time
        sizes = (f"-DHEAD_DIM={head_dim}", f"-DGROUP={group}")
        options = [*flags, *sizes, str(folder / compiler.SOURCES[0])]
        subprocess.run([*compiler.require_compiler().command, *options, "-o", str(out), "-lm"], check=True)
        return out

    work = TemporaryDirectory(prefix="kernel-")
    return lambda: patch.object(onnx_engine, "compiled_kernel", compiled)


def mutant(
    name: str, policy: str, models: str, before: str, after: str, kind: str = "kernels", by: str = "stress_test"
) -> Fault:
    """Return a fault: a kernel with one place changed."""
    return Fault(kind, name, policy, models, SOUND, by, loads=kernel(before, after), where="the kernel")


FAULTS = [
    mutant("sum_not_rescaled", "fp8", "online softmax: the sum is not rescaled when the maximum rises",
           "    partial->sum *= shrink;\n", ""),
    mutant("mask_one_too_many", "fp8", "the mask lets one token too many in",
           "(lanes + t < page->last)", "(lanes + t <= page->last)"),
    mutant("small_weights_dropped", "fp8", "tokens of less than e**-6 of the largest weight are skipped",
           "Ints tiny = x < splat(-87.0f);", "Ints tiny = x < splat(-6.0f);", by="conformance"),
    mutant("chunk_reads_head_0", "fp8", "a later chunk reads every head's cache from head 0",
           "view_page(call, unit, &region, unit->page, &view);",
            "Unit first = *unit; first.head = 0; view_page(call, &first, &region, unit->page, &view);"),
]  # fmt: skip
