"""Ahead-of-time compilation of the kernels to PTX, for launches that pass only inputs, int32 extras and outputs.

Needs neither a GPU nor a driver. TRITON_INTERPRET must not be set: Triton reads it when a kernel is defined.
"""

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from plugins.kv_attention.kernels.append import append
from plugins.kv_attention.kernels.context import context_partial, context_reduce
from plugins.kv_attention.kernels.context_variants import context_variant, join_variant
from plugins.kv_attention.kernels.decode import decode_partial
from plugins.kv_attention.kernels.plan import plan_work
from plugins.kv_attention.kernels.reduce import decode_reduce
from plugins.kv_attention.kernels.variants import (
    Variant,
    append_variant,
    decode_variant,
    partial_dtype,
    plan_variant,
    reduce_variant,
)
from plugins.kv_attention.layout import CacheLayout, SideLayout

POINTERS = {"float16": "*fp16", "bfloat16": "*bf16", "float32": "*fp32", "int8": "*i8", "float8_e4m3fn": "*u8"}
"""Triton's pointer type for each of torch's element types. Kernels load float8 as bytes."""

PORTABLE_PTX = 81
"""PTX ISA 8.1 (CUDA 12.1): every driver since then loads it, and it is the first that converts float8 on sm_89."""

NEWER_PTX = 100
"""First compute capability that PORTABLE_PTX does not know; from here on Triton chooses the PTX version."""

SHARED_LIMIT = 48 * 1024
"""Bytes of shared memory that a kernel may use without cudaFuncSetAttribute."""


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel compiled for one target. A block has 32 * num_warps threads."""

    name: str
    """Entry symbol in `ptx`."""
    ptx: str
    """PTX without Triton's hidden parameters."""
    cubin: bytes
    """`ptx` assembled by ptxas."""
    num_warps: int
    shared_bytes: int
    registers: int
    spill_bytes: int
    parameters: tuple[tuple[str, str], ...]
    """(name, Triton type) of inputs, int32 extras and outputs, in order."""


def compile_decode(layout: CacheLayout, *, group: int, query_dtype: str, scaling: float, sm: int) -> CompiledKernel:
    """Compile decode_partial for any batch and number of programs: grid (H, Y), Y the rows of the work list.

    The int32 extra `table_width` is the number of columns of page_table.

    Args:
        layout: Format of the cache.
        group: Query heads per KV head.
        query_dtype: torch's name of the type of query, key_new and value_new.
        scaling: Factor of the scores.
        sm: Compute capability, 90 for sm_90.

    Raises:
        ValueError: The group or the scaling is out of range.
        RuntimeError: Triton interprets its kernels in this process, or ptxas refuses the PTX.
    """
    variant = decode_variant(layout, group=group, query_dtype=query_dtype, scaling=scaling, sm=sm)
    types = _attention_types(layout, query_dtype) | {"work": "*i32", "sequences": "*i32"}
    return compile_kernel(decode_partial, types, variant, sm)


def compile_plan(*, sink_tokens: int, recent_tokens: int, sm: int) -> CompiledKernel:
    """Compile plan_work: grid (plan_grid(programs)). Its int32 extras are `batch` and `programs`.

    Args:
        sink_tokens: Exact tokens of the layout at the beginning of a sequence.
        recent_tokens: Exact tokens of the layout at its end.
        sm: Compute capability, 90 for sm_90.

    Raises:
        RuntimeError: As compile_decode.
    """
    types = {"lengths": "*i32", "batch": "i32", "programs": "i32", "work": "*i32", "sequences": "*i32"}
    return compile_kernel(plan_work, types, plan_variant(sink_tokens=sink_tokens, recent_tokens=recent_tokens), sm)


def compile_reduce(*, q_heads: int, head_dim: int, out_dtype: str, sm: int) -> CompiledKernel:
    """Compile decode_reduce for any batch and number of programs: grid (Hq, B).

    Args:
        q_heads: Hq.
        head_dim: D.
        out_dtype: torch's name of the type of the output, which is that of the queries.
        sm: Compute capability, 90 for sm_90.

    Raises:
        RuntimeError: As compile_decode.
    """
    variant = reduce_variant(q_heads=q_heads, head_dim=head_dim, out_dtype=out_dtype, sm=sm)
    types = {
        "partial_acc": POINTERS[partial_dtype(out_dtype)],
        "partial_ml": "*fp32",
        "sequences": "*i32",
        "out": POINTERS[out_dtype],
    }
    return compile_kernel(decode_reduce, types, variant, sm)


def compile_context(layout: CacheLayout, *, group: int, rows: int, query_dtype: str, scaling: float, sm: int) -> CompiledKernel:
    """Compile context_partial for any number of sequences with as many new tokens each: grid (blocks, H, S).

    Blocks are those of context_blocks, S is context_splits(splits). The int32 extras are `table_width`, the number of columns
    of page_table, and `tokens`, the new tokens of each sequence.

    Args:
        layout: Format of the cache.
        group: Query heads per KV head.
        rows: Query rows of a KV head that a sequence is likely to have.
        query_dtype: torch's name of the type of query, key_new and value_new.
        scaling: Factor of the scores.
        sm: Compute capability, 90 for sm_90.

    Raises:
        ValueError: The group or the scaling is out of range.
        RuntimeError: As compile_decode.
    """
    variant = context_variant(layout, group=group, rows=rows, query_dtype=query_dtype, scaling=scaling, sm=sm)
    types = _attention_types(layout, query_dtype) | {"query_starts": None, "tokens": "i32", "sequences": None}
    return compile_kernel(context_partial, types, variant, sm)


def compile_join(layout: CacheLayout, *, splits: int, out_dtype: str, sm: int) -> CompiledKernel:
    """Compile context_reduce: grid (X * Hq). Its int32 extra `splits` is S.

    Args:
        layout: Format of the cache.
        splits: S, as context_splits returns it.
        out_dtype: torch's name of the type of the output, which is that of the queries.
        sm: Compute capability, 90 for sm_90.

    Raises:
        RuntimeError: As compile_decode.
    """
    variant = join_variant(layout, splits=splits, out_dtype=out_dtype, sm=sm)
    types = {
        "partial_acc": POINTERS[partial_dtype(out_dtype)],
        "partial_ml": "*fp32",
        "splits": "i32",
        "out": POINTERS[out_dtype],
    }
    return compile_kernel(context_reduce, types, variant, sm)


def compile_append(layout: CacheLayout, *, new_dtype: str, sm: int) -> CompiledKernel:
    """Compile append for any number of layers and sequences: grid (ceil(H / R), B, L), R = append_variant(...).constants["R"].

    Tensors written in place are passed twice, as TensorRT does: as the inputs `*_in`, which are not read, and as the outputs.
    Nor is `attended` read, what the step's last attention returned, of the type of the new keys.
    The int32 extras are `pages` and `table_width`, the second dimensions of the pools and of page_table, and, with exact
    tokens, `buffers`, the second dimension of the exact buffers.

    Args:
        layout: Format of the cache.
        new_dtype: torch's name of the type of key_new and value_new.
        sm: Compute capability, 90 for sm_90.

    Raises:
        RuntimeError: As compile_decode.
    """
    exact = layout.exact_tokens > 0
    written = {name: POINTERS[dtype] for name, (dtype, _) in (layout.pools(1) | layout.exact_buffers(1)).items()}
    types = {name: written.get(name.removesuffix("_in")) for name in append.arg_names} | {
        "key_new": POINTERS[new_dtype],
        "value_new": POINTERS[new_dtype],
        "page_table": "*i32",
        "lengths": "*i32",
        "exact_slots": "*i32" if exact else None,
        "attended": POINTERS[new_dtype],
        "key_scale": "*fp32" if layout.key.has_static_scales else None,
        "value_scale": "*fp32" if layout.value.has_static_scales else None,
        "pages": "i32",
        "table_width": "i32",
        "buffers": "i32" if exact else None,
    }
    variant = append_variant(layout, sm=sm)
    return compile_kernel(append, {name: kind for name, kind in types.items() if name not in variant.constants}, variant, sm)


def compile_kernel(kernel: Any, types: Mapping[str, str | None], variant: Variant, sm: int) -> CompiledKernel:
    """Compile one of the kernels.

    The compiler is told that pointers are 16-byte aligned; otherwise it would load byte by byte.

    Args:
        kernel: A triton.JITFunction.
        types: Triton's type of each parameter that is not a constexpr; None for a tensor that the layout does not have.
        variant: Constexprs and launch options.
        sm: Compute capability, 90 for sm_90.

    Raises:
        RuntimeError: Triton interprets its kernels in this process, the kernel uses a hidden parameter, or ptxas refuses it.
    """
    if not isinstance(kernel, triton.JITFunction):
        raise RuntimeError("Triton interprets its kernels: unset TRITON_INTERPRET before the first import of triton to compile")
    constants: dict[str, Any] = variant.constants | {name: None for name, kind in types.items() if kind is None}
    signature = {name: types.get(name) or "constexpr" for name in kernel.arg_names}
    aligned = {
        (number,): [["tt.divisibility", 16]] for number, name in enumerate(kernel.arg_names) if signature[name].startswith("*")
    }
    options = variant.options
    if sm < NEWER_PTX:
        options["ptx_version"] = PORTABLE_PTX
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)
    parameters = tuple((name, signature[name]) for name in kernel.arg_names if signature[name] != "constexpr")
    ptx = strip_hidden_parameters(compiled.asm["ptx"], len(parameters))
    cubin, registers, spill_bytes = assemble(ptx, sm)
    shared = compiled.metadata.shared
    return CompiledKernel(compiled.metadata.name, ptx, cubin, variant.num_warps, shared, registers, spill_bytes, parameters)


def strip_hidden_parameters(ptx: str, keep: int) -> str:
    """Return PTX whose entry declares only its first `keep` parameters.

    Raises:
        RuntimeError: There is no entry, or its body uses one of the removed parameters.
    """
    entry = re.search(r"(\.visible \.entry (\w+)\()(.*?)(\n\))", ptx, re.DOTALL)
    if entry is None:
        raise RuntimeError("no .visible .entry in the PTX that Triton made")
    name, parameters, body = entry[2], entry[3].split(",\n"), ptx[entry.end() :]
    used = [f"{name}_param_{i}" for i in range(keep, len(parameters)) if re.search(rf"{name}_param_{i}\b", body)]
    if used:
        raise RuntimeError(f"{name} uses parameters that a launch cannot pass: {', '.join(used)}")
    return ptx[: entry.start()] + entry[1] + ",\n".join(parameters[:keep]) + entry[4] + body


def assembler(sm: int) -> Any:
    """Return Triton's ptxas for a compute capability, with its `path` and `version`: that of Triton's wheel, unless
    TRITON_PTXAS_PATH or TRITON_PTXAS_BLACKWELL_PATH names another.
    """
    return knobs.nvidia.ptxas_blackwell if sm >= NEWER_PTX else knobs.nvidia.ptxas


def assemble(ptx: str, sm: int) -> tuple[bytes, int, int]:
    """Assemble PTX with one entry by Triton's ptxas.

    Returns:
        The cubin, its registers per thread, and the bytes it spills.

    Raises:
        RuntimeError: ptxas refuses the PTX or does not report registers and spills.
    """
    target = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)
    if target is None:
        raise RuntimeError("no .target in the PTX")
    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        command = [assembler(sm).path, "-v", f"-arch={target[1]}", str(source), "-o", str(out)]
        # of this process's environment, which may hold secrets, it needs nothing
        process = subprocess.run(command, capture_output=True, text=True, check=False, env={"TMPDIR": folder})
        if process.returncode:
            raise RuntimeError(f"ptxas refused the PTX: {process.stderr.strip()}")
        cubin = out.read_bytes()
    registers = re.search(r"Used (\d+) registers", process.stderr)
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", process.stderr)
    if registers is None or not spills:
        raise RuntimeError(f"ptxas reported no registers or spills: {process.stderr.strip()}")
    return cubin, int(registers[1]), sum(map(int, spills))


def _attention_types(layout: CacheLayout, query_dtype: str) -> dict[str, str | None]:
    """Types of the parameters that decode_partial and context_partial have in common."""
    exact = "*fp16" if layout.exact_tokens else None
    return dict.fromkeys(("query", "key_new", "value_new"), POINTERS[query_dtype]) | {
        "key_pool": POINTERS[layout.key.storage],
        "value_pool": POINTERS[layout.value.storage],
        "key_scale": _scale_pointer(layout.key),
        "value_scale": _scale_pointer(layout.value),
        "value_block_scale": POINTERS[layout.value.scale_storage] if layout.value.layer_scale else None,
        "page_table": "*i32",
        "lengths": "*i32",
        "key_exact": exact,
        "value_exact": exact,
        "exact_slots": "*i32" if layout.exact_tokens else None,
        "table_width": "i32",
        "partial_acc": POINTERS[partial_dtype(query_dtype)],
        "partial_ml": "*fp32",
    }


def _scale_pointer(side: SideLayout) -> str | None:
    if side.exact:
        return None
    return "*fp32" if side.has_static_scales else "*fp16"
