"""Ahead-of-time compilation of the kernels to PTX, for launches that pass only inputs, int32 extras and outputs.

Needs neither a GPU nor a driver. TRITON_INTERPRET must not be set: Triton reads it when a kernel is defined.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from plugins.kv_attention.kernels.append import append
from plugins.kv_attention.kernels.attend import reduce_parts
from plugins.kv_attention.kernels.context import context_partial
from plugins.kv_attention.kernels.decode import decode_partial, plan_work
from plugins.kv_attention.layout import SideLayout
from plugins.kv_attention.tensorrt_nodes import Operation
from plugins.kv_attention.variants import (
    Setting,
    Variant,
    append_variant,
    context_variant,
    decode_variant,
    partial_dtype,
    plan_variant,
    reduce_variant,
)

Kernel = Operation | Literal["append"]
"""The kernels of a TensorRT plan, and `append`, which only torch launches."""

KERNELS: dict[Kernel, tuple[Any, Callable[[Setting], Variant]]] = {
    "plan_work": (plan_work, plan_variant),
    "decode_partial": (decode_partial, decode_variant),
    "decode_reduce": (reduce_parts, reduce_variant),
    "context_partial": (context_partial, context_variant),
    "context_reduce": (reduce_parts, reduce_variant),
    "append": (append, append_variant),
}
"""Operation -> its kernel, and the function that returns the kernel's variant for a setting."""

POINTERS = {
    "float16": "*fp16", "bfloat16": "*bf16", "float32": "*fp32", "int8": "*i8", "float8_e4m3fn": "*u8", "int32": "*i32"
}  # fmt: skip
"""Triton's pointer type for each of torch's element types. Kernels load float8 as bytes."""

PORTABLE_PTX = 81
"""PTX ISA 8.1 (CUDA 12.1), which every later driver loads. Earlier versions cannot convert float8 on sm_89."""

NEWER_PTX = 100
"""First compute capability that PORTABLE_PTX does not support. From here on Triton chooses the PTX version."""

SHARED_LIMIT = 48 * 1024
"""Maximum bytes of shared memory of a kernel without cudaFuncSetAttribute."""


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel compiled for one target. A block has 32 * num_warps threads."""

    name: str
    """Entry symbol in `ptx`."""
    ptx: str
    """PTX without Triton's hidden parameters."""
    num_warps: int
    shared_bytes: int
    parameters: tuple[tuple[str, str], ...]
    """(name, Triton type) of inputs, int32 extras and outputs, in order."""


@cache
def compile_operation(operation: Kernel, setting: Setting) -> CompiledKernel:
    """Compile the kernel of an operation, once per process, for any number of sequences, pages, buffers and layers.

    Grids: plan_work (plan_grid(programs)), decode_partial (H, Y), decode_reduce (B * Hq), context_partial (blocks, H, S),
    context_reduce (X * Hq), append (ceil(H / R), B, L), with Y the rows of the work list, blocks as
    context_blocks counts them, S = context_splits(splits), R = append_variant(...).constants["R"].
    """
    kernel, specialise = KERNELS[operation]
    types, variant = parameter_types(operation, setting), specialise(setting)
    assert setting.sm is not None, "kernels are compiled for a compute capability"
    if not isinstance(kernel, triton.JITFunction):
        raise RuntimeError("Triton interprets its kernels: unset TRITON_INTERPRET before the first import of triton to compile")
    names = kernel.arg_names
    signature = {name: "constexpr" if name in variant.constants else types[name] or "constexpr" for name in names}
    absent = {name for name, kind in signature.items() if kind == "constexpr"} - variant.constants.keys()
    constants: dict[str, Any] = variant.constants | dict.fromkeys(absent)
    # Pointers are 16-byte aligned; otherwise the compiler would load byte by byte.
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name].startswith("*")}
    options = variant.options | ({"ptx_version": PORTABLE_PTX} if setting.sm < NEWER_PTX else {})
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", setting.sm, 32), options=options)
    parameters = tuple((name, signature[name]) for name in names if signature[name] != "constexpr")
    ptx = strip_hidden_parameters(compiled.asm["ptx"], len(parameters))
    return CompiledKernel(compiled.metadata.name, ptx, variant.num_warps, compiled.metadata.shared, parameters)


def parameter_types(operation: Kernel, setting: Setting) -> dict[str, str | None]:
    """Return Triton's type of every parameter except constexprs, by name; None for an absent tensor.

    Parameters with the same name have the same meaning in all kernels. The int32 extras are the columns of page_table
    (`table_width`), the new tokens per sequence (`tokens`), the splits, programs and sequences (`batch`), and the second
    dimensions of the append's pools and exact buffers (`pages`, `buffers`).
    """
    layout, new = setting.layout, POINTERS[setting.dtype]
    sides = {"key": layout.key, "value": layout.value}
    exact = "*fp16" if layout.exact_tokens else None
    stored = {name: POINTERS[dtype] for name, (dtype, _) in (layout.pools(1) | layout.exact_buffers(1)).items()}
    types: dict[str, str | None] = {
        **dict.fromkeys(("query", "key_new", "value_new", "out"), new),
        **dict.fromkeys(("page_table", "lengths", "work", "sequences"), "*i32"),
        **dict.fromkeys(("table_width", "tokens", "splits", "programs", "batch", "pages"), "i32"),
        "exact_slots": "*i32" if exact else None,
        "buffers": "i32" if exact else None,
        "partial_acc": POINTERS[partial_dtype(setting.dtype)],
        "partial_ml": "*fp32",
        **{name: stored.get(name) for side in sides for name in (f"{side}_pool", f"{side}_scale_pool", f"{side}_exact")},
        **{f"{name}_scale": "*fp32" if side.has_static_scales else None for name, side in sides.items()},
    }
    if operation == "append":
        return types
    # In the attention kernels, dynamic scales have the name of static scales; only block scales have a separate name.
    types |= {f"{name}_scale": _scale_pointer(side) for name, side in sides.items()}
    types["value_block_scale"] = POINTERS[layout.value.codes.scale_storage] if layout.value.layer_scale else None
    if operation == "context_reduce":
        types["sequences"] = None
    elif operation == "decode_reduce":
        types["splits"] = None
    return types


def strip_hidden_parameters(ptx: str, keep: int) -> str:
    """Return the PTX with only the first `keep` parameters of its entry. The others must be unused."""
    entry = re.search(r"(\.visible \.entry (\w+)\()(.*?)(\n\))", ptx, re.DOTALL)
    if entry is None:
        raise RuntimeError("Triton's PTX has no .visible .entry")
    name, parameters, body = entry[2], entry[3].split(",\n"), ptx[entry.end() :]
    used = [f"{name}_param_{i}" for i in range(keep, len(parameters)) if re.search(rf"{name}_param_{i}\b", body)]
    if used:
        raise RuntimeError(f"{name} uses parameters that a launch cannot pass: {', '.join(used)}")
    return ptx[: entry.start()] + entry[1] + ",\n".join(parameters[:keep]) + entry[4] + body


def _scale_pointer(side: SideLayout) -> str | None:
    if side.exact:
        return None
    return "*fp32" if side.has_static_scales else "*fp16"
