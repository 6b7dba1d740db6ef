"""Mutants: the attention kernel compiled from sources with one place changed, or graphs with one operator changed."""

import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import onnx

from faults.fault import Fault
from faults.hooks import SOUND
from stages.engines.onnx import engine as onnx_engine
from stages.engines.onnx.engine import GraphSession
from stages.engines.onnx.native import compiler

NATIVE = Path(compiler.__file__).parent

Loads = Callable[[], AbstractContextManager[None]]


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

    @contextmanager
    def loads() -> Iterator[None]:
        with patch.object(onnx_engine, "compiled_kernel", compiled):
            yield

    work = TemporaryDirectory(prefix="kernel-")
    return loads


def graph(function: str, before: str, after: str) -> Loads:
    """Replace one operator type in all graph functions whose name starts with `function`."""

    class Mutant(GraphSession):
        def __init__(self, path: Path, threads: int, **options: Any) -> None:
            model = options.pop("model", None) or onnx.load(path, load_external_data=False)
            for body in model.functions:
                for node in body.node if body.name.startswith(function) else ():
                    node.op_type = after if node.op_type == before else node.op_type
            super().__init__(path, threads, model=model, **options)

    mutant: Any = Mutant
    return lambda: patch.object(onnx_engine, "GraphSession", mutant)


END_OF_PAGE = """  }
  for (int q = 0; q < GROUP; q++) {
    memcpy("""
HALF = "    for (int q = 0; q < GROUP; q++) for (int d = 0; d < HEAD_DIM; d++) sums[q][d] = (float)(_Float16)sums[q][d];\n"


def mutant(
    name: str, policy: str, models: str, before: str, after: str, kind: str = "kernels", by: str = "stress_test"
) -> Fault:
    """Return a fault: a kernel with one place changed."""
    return Fault(kind, name, policy, models, SOUND, by, loads=kernel(before, after), where="the kernel")


def operator(name: str, policy: str, models: str, function: str, before: str, after: str, **options: Any) -> Fault:
    """Return a fault: graphs with one operator changed."""
    where = f"graph: {function}"
    return Fault("kernels", name, policy, models, SOUND, loads=graph(function, before, after), where=where, **options)


FAULTS = [
    mutant("sum_not_rescaled", "fp8", "online softmax: the sum is not rescaled when the maximum rises",
           "    partial->sum *= shrink;\n", ""),
    mutant("mask_one_too_many", "fp8", "the mask lets one token too many in",
           "(lanes + t < page->last)", "(lanes + t <= page->last)"),
    mutant("last_units_lost", "fp8", "the join of a split kernel takes two partial results: 512 tokens",
           "count; i++) {\n    const Partial", "count && i < 2; i++) {\n    const Partial"),
    mutant("sums_in_float16", "fp8", "sums of values are kept in float16 from page to page", END_OF_PAGE, HALF + END_OF_PAGE),
    mutant("small_weights_dropped", "fp8", "tokens of less than e**-6 of the largest weight are skipped",
           "Ints tiny = x < splat(-87.0f);", "Ints tiny = x < splat(-6.0f);", by="conformance"),
    mutant("chunk_reads_head_0", "fp8", "a later chunk reads every head's cache from head 0",
           "view_page(call, unit, &region, unit->page, &view);",
            "Unit first = *unit; first.head = 0; view_page(call, &first, &region, unit->page, &view);"),
]  # fmt: skip
