"""Mutants: the attention kernel compiled from a source with one place changed, the graphs with one operator changed."""

import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import onnx

from faults.fault import Fault
from stages.engines.onnx import engine as onnx_engine
from stages.engines.onnx.native import compiler
from stages.engines.onnx.session import GraphSession

NATIVE = Path(compiler.__file__).parent

Loads = Callable[[], AbstractContextManager[None]]


def kernel(before: str, after: str) -> Loads:
    """Compile the kernel with one place of its source changed."""

    def compiled(head_dim: int, group: int) -> Path:
        folder = Path(work.name)
        out = folder / "mutant.so"
        if out.exists():
            return out
        for name in compiler.SOURCES:
            shutil.copyfile(NATIVE / name, folder / name)
        source = (NATIVE / "attention.c").read_text(encoding="utf-8")
        assert source.count(before) == 1, f"the kernel has {source.count(before)} places like {before!r}"
        (folder / "attention.c").write_text(source.replace(before, after), encoding="utf-8")
        sizes = (f"-DHEAD_DIM={head_dim}", f"-DGROUP={group}")
        options = [*compiler.FLAGS, *sizes, str(folder / compiler.SOURCES[0])]
        subprocess.run([*compiler.require_compiler().command, *options, "-o", str(out), "-lm"], check=True)
        return out

    @contextmanager
    def loads() -> Iterator[None]:
        with patch.object(onnx_engine, "compiled_kernel", compiled):
            yield

    work = TemporaryDirectory(prefix="kernel-")
    return loads


def graph(function: str, before: str, after: str) -> Loads:
    """Load the graphs with an operator of some functions replaced: everywhere in those whose name begins so."""

    class Mutant(GraphSession):
        def __init__(self, path: Path, threads: int, **options: Any) -> None:
            model = options.pop("model", None) or onnx.load(path, load_external_data=False)
            for body in model.functions:
                for node in body.node if body.name.startswith(function) else ():
                    node.op_type = after if node.op_type == before else node.op_type
            super().__init__(path, threads, model=model, **options)

    mutant: Any = Mutant
    return lambda: patch.object(onnx_engine, "GraphSession", mutant)


def nothing(_: Any) -> None:
    """The fault is in what was loaded."""


END_OF_PAGE = """  }
  for (int q = 0; q < GROUP; q++) {
    memcpy("""
HALF = "    for (int q = 0; q < GROUP; q++) for (int d = 0; d < HEAD_DIM; d++) sums[q][d] = (float)(_Float16)sums[q][d];\n"

KIND = "kernels"

FAULTS = [
    Fault("sum_not_rescaled", KIND, "online softmax: the sum is not rescaled when the maximum rises", "fp8", nothing,
          loads=kernel("    partial->sum *= shrink;\n", "")),
    Fault("mask_one_too_many", KIND, "the kernel's mask lets one token too many in", "fp8", nothing,
          loads=kernel("(lanes + t < page->last)", "(lanes + t <= page->last)")),
    Fault("last_units_lost", KIND, "the join of a split kernel takes two partial results: 512 tokens", "fp8", nothing,
          loads=kernel("count; i++) {\n    const Partial", "count && i < 2; i++) {\n    const Partial")),
    Fault("scales_of_head_0", KIND, "the kernel reads every head's value scales from head 0", "int8", nothing,
          loads=kernel("(size_t)region->value_table[page] * layer->kv_heads + unit->head) * scale_page_bytes(values->side)",
                       "(size_t)region->value_table[page] * layer->kv_heads) * scale_page_bytes(values->side)")),
    Fault("sums_in_float16", KIND, "sums of values are kept in float16 from page to page", "fp8", nothing,
          loads=kernel(END_OF_PAGE, HALF + END_OF_PAGE)),
    Fault("graph_mask_one_too_many", KIND, "the graph's mask compares with <= in place of <", "int8", nothing, engine="graph",
          loads=graph("PagedAttention", "Less", "LessOrEqual")),
    Fault("graph_floors_values", KIND, "values are rounded down, in the graphs of the kernel's engine", "fp8k_int4v", nothing,
          loads=graph("QuantizeValue", "Round", "Floor")),
]  # fmt: skip
