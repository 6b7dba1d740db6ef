"""Mutants: the attention kernel compiled from a source with one place changed, the graphs with one operator changed."""

import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
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


def kernel(before: str, after: str, file: str = "attention.c") -> Loads:
    """Compile the kernel with one place of a source changed."""

    def compiled(head_dim: int, group: int) -> Path:
        folder = Path(work.name)
        out = folder / "mutant.so"
        if out.exists():
            return out
        for name in compiler.SOURCES:
            shutil.copyfile(NATIVE / name, folder / name)
        source = (NATIVE / file).read_text(encoding="utf-8")
        assert source.count(before) == 1, f"the kernel has {source.count(before)} places like {before!r}"
        (folder / file).write_text(source.replace(before, after), encoding="utf-8")
        sizes = (f"-DHEAD_DIM={head_dim}", f"-DGROUP={group}")
        flags = [flag.replace("-O3", "-O1") for flag in compiler.FLAGS]  # it compiles in a third of the time
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


def mutant(
    name: str, policy: str, models: str, before: str, after: str, file: str = "attention.c", kind: str = "kernels"
) -> Fault:
    """A kernel with one place changed."""
    return Fault(kind, name, policy, models, SOUND, loads=kernel(before, after, file), where=file)


prefill = partial(mutant, file="prefill.c")


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
    mutant("joined_without_weights", "fp8", "the join of a split kernel adds the splits' sums without their weights",
           "sum += weight * partial->sum;", "sum += partial->sum;"),
    mutant("new_token_unscaled", "fp8", "the new token's score lacks the softmax scale",
           "score += query[d] * scaling * key[d];", "score += query[d] * key[d];"),
    mutant("new_value_lost", "fp8", "the new token has a weight and no value",
           "out[d] = weight * value[d];", "out[d] = 0 * value[d];"),
    mutant("scales_of_head_0", "int8", "every head's value scales are read from head 0",
           VALUE_SCALES, VALUE_SCALES.replace(" + unit->head", "")),
    mutant("value_scales_of_first_page", "int8", "the value scales of a unit's first page serve all of its pages",
           f"size_t v = ({VALUE_SCALES}", f"size_t v = ({VALUE_SCALES.replace('[page]', '[unit->page]')}"),
    mutant("sums_in_float16", "fp8", "sums of values are kept in float16 from page to page", END_OF_PAGE, HALF + END_OF_PAGE),
    mutant("queries_interleaved", "fp8", "GQA: query heads are taken in turn in place of in groups", QUERIES, INTERLEAVED),
    mutant("int4_halves_interleaved", "fp8k_int4v", "4-bit values are unpacked as even and odd channels",
           "int high = v >= VECTORS / 2;", "int high = v % 2;", file="codes.h"),
    mutant("small_weights_dropped", "fp8", "tokens of less than e**-6 of the largest weight are skipped",
           "Ints tiny = x < splat(-87.0f);", "Ints tiny = x < splat(-6.0f);", file="codes.h"),
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
    prefill("chunk_sees_the_next_token", "fp8", "prefill's causal mask lets the next token in",
            "region.last = step + 1;", "region.last = step + 2;"),
    prefill("chunk_reads_head_0", "fp8", "a later chunk reads every head's cache from head 0",
            "view_page(call, unit, &region, unit->page, &view);",
            "Unit first = *unit; first.head = 0; view_page(call, &first, &region, unit->page, &view);"),
    prefill("chunk_reads_one_page_less", "fp8", "a later chunk does not read the last head's newest page",
            "i < prefill->cached; i++) {\n    const Unit", "i + 1 < prefill->cached; i++) {\n    const Unit"),
    prefill("chunk_queries_reversed", "fp8", "prefill: a group's query heads in reverse order",
            "GROUP + r % GROUP) * prefill->tokens", "GROUP + (GROUP - 1 - r % GROUP)) * prefill->tokens"),
    prefill("chunk_reads_unscaled", "fp8", "a later chunk reads the cache without its static scales",
            "factors[d] = channel_factor(from, head, d);",
            "factors[d] = unit(side->kind);"),
    prefill("tile_border_masked", "fp8", "prefill: the last token of every 64 is masked for later tiles",
            "span->last = region.last - start < PAGE ? region.last - start : PAGE;",
            "span->last = region.last - start < PAGE ? region.last - start : PAGE - 1;"),
    operator("graph_mask_one_too_many", "int8", "the graph's mask compares with <= in place of <",
             "PagedAttention", "Less", "LessOrEqual", engine="graph"),
    operator("graph_sinks_one_off", "int8_sinks", "the graph's sinks are compared with > in place of >=",
             "PagedAttention", "GreaterOrEqual", "Greater", engine="graph"),
    operator("graph_floors_values", "fp8k_int4v", "values are rounded down, in the graphs of the kernel's engine",
             "QuantizeValue", "Round", "Floor"),
    operator("graph_ceils_keys", "int8", "keys are rounded up, in the graphs of the kernel's engine",
             "QuantizeKey", "Round", "Ceil"),
]  # fmt: skip
