"""Mutants: the attention kernel compiled from a source with one place changed, the graphs with one operator changed."""

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
from stages.engines.onnx.native import compiler
from stages.engines.onnx.session import GraphSession

NATIVE = Path(compiler.__file__).parent

Loads = Callable[[], AbstractContextManager[None]]


def kernel(before: str, after: str) -> Loads:
    """Compile the kernel with the one place of its sources changed that reads so."""

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
        flags = [flag.replace("-O3", "-O1") for flag in compiler.FLAGS]  # it compiles in a third of the time
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


END_OF_PAGE = """  }
  for (int q = 0; q < GROUP; q++) {
    memcpy("""
HALF = "    for (int q = 0; q < GROUP; q++) for (int d = 0; d < HEAD_DIM; d++) sums[q][d] = (float)(_Float16)sums[q][d];\n"
QUERIES = """unit->row * call->layer->kv_heads + unit->head) * GROUP * HEAD_DIM;
  for (int q = 0; q < GROUP; q++, from += HEAD_DIM)"""
INTERLEAVED = """unit->row * call->layer->kv_heads * GROUP + unit->head) * HEAD_DIM;
  for (int q = 0; q < GROUP; q++, from += call->layer->kv_heads * HEAD_DIM)"""
VALUE_SCALES = "(size_t)region->value_table[page] * layer->kv_heads + unit->head) * scale_page_bytes(values->side)"
PARTIAL = "const Partial *partial = &partials[i * GROUP];\n    "


def mutant(name: str, policy: str, models: str, before: str, after: str, kind: str = "kernels", by: str = "probe") -> Fault:
    """A kernel with one place changed."""
    return Fault(kind, name, policy, models, SOUND, by, loads=kernel(before, after), where="the kernel")


def operator(name: str, policy: str, models: str, function: str, before: str, after: str, **options: Any) -> Fault:
    """Graphs with one operator changed."""
    where = f"graph: {function}"
    return Fault("kernels", name, policy, models, SOUND, loads=graph(function, before, after), where=where, **options)


FAULTS = [
    mutant("sum_not_rescaled", "fp8", "online softmax: the sum is not rescaled when the maximum rises",
           "    partial->sum *= shrink;\n", ""),
    mutant("mask_one_too_many", "fp8", "the mask lets one token too many in",
           "(lanes + t < page->last)", "(lanes + t <= page->last)"),
    mutant("last_units_lost", "fp8", "the join of a split kernel takes two partial results: 512 tokens",
           "count; i++) {\n    const Partial", "count && i < 2; i++) {\n    const Partial"),
    mutant("new_token_unscaled", "fp8", "the new token's score lacks the softmax scale",
           "score += query[d] * layer->scaling * key[d];", "score += query[d] * key[d];"),
    mutant("scales_of_head_0", "int8", "every head's value scales are read from head 0",
           VALUE_SCALES, VALUE_SCALES.replace(" + unit->head", "")),
    mutant("sums_in_float16", "fp8", "sums of values are kept in float16 from page to page", END_OF_PAGE, HALF + END_OF_PAGE),
    mutant("queries_interleaved", "fp8", "GQA: query heads are taken in turn in place of in groups", QUERIES, INTERLEAVED),
    mutant("int4_halves_interleaved", "fp8k_int4v", "4-bit values are unpacked as even and odd channels",
           "int high = v >= VECTORS / 2;", "int high = v % 2;"),
    mutant("small_weights_dropped", "fp8", "tokens of less than e**-6 of the largest weight are skipped",
           "Ints tiny = x < splat(-87.0f);", "Ints tiny = x < splat(-6.0f);", by="conformance"),
    mutant("hadamard_half_done", "int8_hadamard", "queries and values are rotated by one stage of the butterfly too few",
           "half < HEAD_DIM; half *= 2", "half < HEAD_DIM / 2; half *= 2"),
    mutant("recent_read_twice", "int8_sinks", "recent tokens are read from the pool and from their exact copies",
           "end = length - layer->recent;", "end = length;"),
    mutant("sinks_read_twice", "int8_sinks", "sinks are read from the pool and from their exact copies",
           "low = larger(layer->sink, first_token(layer, length + step));", "low = first_token(layer, length + step);"),
    mutant("ring_ages_negative", "int8_sinks", "C's remainder of a negative number: the ring's ages below zero",
           "  if (age < 0) age += layer->recent;\n", ""),
    mutant("zeros_before_scales", "int8_asym", "zero points are added before the scale is applied",
           "x * scales[of[v]] + zeros[of[v]]", "(x + zeros[of[v]]) * scales[of[v]]"),
    mutant("slide_to_whole_lanes", "fp8_mistral", "the window's beginning is rounded down to a vector of tokens",
           "(lanes + t >= page->first) & ", ""),
    mutant("chunk_sees_the_next_token", "fp8", "prefill's causal mask lets the next token in",
           "region.last = step + 1;", "region.last = step + 2;"),
    mutant("chunk_reads_head_0", "fp8", "a later chunk reads every head's cache from head 0",
           "view_page(call, unit, &region, unit->page, &view);",
            "Unit first = *unit; first.head = 0; view_page(call, &first, &region, unit->page, &view);"),
    mutant("chunk_reads_one_page_less", "fp8", "a later chunk does not read the last head's newest page",
           "i < prefill->cached; i++) {\n    const Unit", "i + 1 < prefill->cached; i++) {\n    const Unit"),
    mutant("chunk_reads_unscaled", "fp8", "a later chunk reads the cache without its static scales",
           "factors[d] = channel_factor(from, head, d);", "factors[d] = unit(side->kind);"),
    operator("graph_mask_one_too_many", "int8", "the graph's mask compares with <= in place of <",
             "PagedAttention", "Less", "LessOrEqual", engine="graph"),
    operator("graph_floors_values", "fp8k_int4v", "values are rounded down, in the graphs of the kernel's engine",
             "QuantizeValue", "Round", "Floor"),
]  # fmt: skip
