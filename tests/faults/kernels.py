"""Mutants: the attention kernel compiled from sources with one place changed."""

import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

from faults.fault import Fault
from faults.hooks import SOUND
from stages.engines.onnx import engine as onnx_engine
from stages.engines.onnx.native import compiler

NATIVE = Path(compiler.__file__).parent


def kernel(before: str, after: str) -> Callable[[], AbstractContextManager[None]]:
    """Compile the kernel with the text `before`, which must occur exactly once in the sources, replaced by `after`."""

    def compiled(folder: str, head_dim: int, group: int) -> Path:
        texts = {name: (NATIVE / name).read_text(encoding="utf-8") for name in compiler.SOURCES}
        places = sum(text.count(before) for text in texts.values())
        assert places == 1, f"the kernel has {places} places like {before!r}"
        for name, text in texts.items():
            (Path(folder) / name).write_text(text.replace(before, after), encoding="utf-8")
        flags = [flag.replace("-O3", "-O1") for flag in compiler.FLAGS]  # compiles in a third of the time
        sizes, out = (f"-DHEAD_DIM={head_dim}", f"-DGROUP={group}"), Path(folder) / "mutant.so"
        options = [*flags, *sizes, str(Path(folder) / compiler.SOURCES[0])]
        subprocess.run([*compiler.require_compiler().command, *options, "-o", str(out), "-lm"], check=True)
        return out

    @contextmanager
    def loads() -> Iterator[None]:
        with TemporaryDirectory() as folder, patch.object(onnx_engine, "compiled_kernel", partial(compiled, folder)):
            yield

    return loads


def mutant(name: str, models: str, before: str, after: str) -> Fault:
    """Return a fault: a kernel with one place changed."""
    return Fault("kernels", name, models, SOUND, kernel(before, after))


FAULTS = [
    mutant("mask_one_too_many", "the mask lets one token too many in",
           "(lanes + t < page->last)", "(lanes + t <= page->last)"),
    mutant("chunk_reads_head_0", "a later chunk reads every head's cache from head 0",
           "view_page(call, unit, &region, unit->page, &view);",
            "Unit first = *unit; first.head = 0; view_page(call, &first, &region, unit->page, &view);"),
]  # fmt: skip
