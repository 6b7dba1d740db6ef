"""The TensorRT plugin under NVIDIA's own Python: declarations, shape functions, launch parameters and PTX, without a GPU.

Shapes: B sequences, N pages of a pool, P pages of a sequence, M exact buffers; a triple is the smallest, the likely and the
largest of an optimization profile.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import pytest
from helpers.policies.shipped import SHIPPED
from helpers.tensorrt import builder
from helpers.tensorrt.builder import PluginInput, PluginPart, Run, Triple

from plugins.kv_attention.layout import CacheLayout, SideLayout
from plugins.kv_attention.tensorrt_nodes import (
    ATTRIBUTES,
    CONTEXT_REDUCE,
    DATA_TYPES,
    PLAN,
    REDUCE,
    Node,
    all_nodes,
    attributes_of,
    input_specs,
    node_of,
)
from plugins.kv_attention.variants import MAX_BLOCK_ROWS, Compute, Setting, context_variant, plan_grid
from stages.engines.onnx.bundle import ModelInfo
from stages.engines.onnx.functions import AttentionSpec
from stages.engines.paged.kernel_layout import check_kernels
from stages.policies.arithmetic_onnx import onnx_type

ONNX = onnx.TensorProto
TENSORRT_TYPES: dict[int, str] = {ONNX.FLOAT16: "HALF", ONNX.BFLOAT16: "BF16", ONNX.FLOAT8E4M3FN: "FP8", ONNX.INT8: "INT8"}

FIXED: dict[str, int | Triple] = {"B": 16, "N": 4096, "P": 512, "M": 16, "X": (1, 512, 1024)}
VARYING: dict[str, int | Triple] = {"B": (1, 8, 64), "N": (1, 512, 4096), "P": (1, 16, 512), "M": (1, 8, 64), "X": (1, 64, 100)}
SCALING = float(np.float32(128**-0.5))


@dataclass(frozen=True)
class PluginCase:
    """One bundle's attention."""

    layout: CacheLayout
    group: int
    compute: Compute
    programs: int
    """K of a decode step, and number of splits over the pages for several new tokens."""
    sm: int
    sizes: dict[str, int | Triple]
    suffix: str
    """Suffix of the operations that take this layout's tensors."""

    @property
    def setting(self) -> Setting:
        return Setting(self.layout, self.compute, self.sm, self.group, SCALING, MAX_BLOCK_ROWS)

    @property
    def batch(self) -> Triple:
        return triple(self.sizes["B"])

    @property
    def rows(self) -> Triple:
        """Size of dimension Y: programs of a KV head, including one program per sequence if there are exact tokens."""
        return tuple(self.programs + (b if self.layout.exact_tokens else 0) for b in self.batch)  # type: ignore[return-value]

    @property
    def parts(self) -> Triple:
        """Size of dimension R."""
        return tuple(y + b for y, b in zip(self.rows, self.batch, strict=True))  # type: ignore[return-value]

    def tensors(self, node: Node) -> dict[str, PluginInput]:
        specs = input_specs(node, self.setting, self.programs)
        sizes = self.sizes | {letter: n[0] if len(set(n)) == 1 else n for letter, n in (("Y", self.rows), ("R", self.parts))}
        return {
            name: PluginInput(DATA_TYPES[dtype], tuple(sizes[dim] if isinstance(dim, str) else dim for dim in dims))
            for name, (dtype, dims) in specs.items()
        }

    @property
    def attributes(self) -> dict[str, int | float]:
        return attributes_of(self.setting, self.programs)


CASES = {
    "fp8k_int4v": PluginCase(
        CacheLayout(8, 128, SideLayout("fp8_e4m3", "per_tensor"), SideLayout("int4", "per_group", 64)),
        group=8, compute="float16", programs=114, sm=90, sizes=FIXED, suffix="_kstatic_vdynamic",
    ),
    "aged": PluginCase(
        CacheLayout(3, 64, SideLayout("fp8_e4m3", "per_token"), SideLayout("int4", "per_group", 32), 4, 60),
        group=4, compute="bfloat16", programs=3, sm=89, sizes=VARYING, suffix="_kdynamic_vdynamic_exact",
    ),
    "fp8k_nvfp4v": PluginCase(
        CacheLayout(2, 128, SideLayout("fp8_e4m3", "per_tensor"), SideLayout("nvfp4", "per_group", 16)),
        group=8, compute="float16", programs=4, sm=90, sizes=VARYING, suffix="_kstatic_vblocks",
    ),
    "guarded": PluginCase(
        CacheLayout(2, 64, SideLayout("bf16"), SideLayout("int8", "per_head"), 0, 32),
        group=1, compute="bfloat16", programs=2, sm=80, sizes=FIXED, suffix="_vstatic_exact",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def tensorrt() -> Iterator[Run]:
    with builder.nvidia() as run:
        yield run


def triple(size: int | Triple) -> Triple:
    return size if isinstance(size, tuple) else (size,) * 3


def check_kernel(plan: PluginPart, node: Node, case: PluginCase, extras: list[Triple]) -> None:
    """Check the properties that all operations share."""
    assert plan.parameters == ["u64"] * len(node.inputs) + ["u32"] * len(extras) + ["u64"] * len(node.outputs)
    assert plan.extras == extras
    assert re.search(rf"^\.target sm_{case.sm}a?$", plan.ptx, re.MULTILINE)
    (threads, *other_dims), shared = plan.block, plan.shared_bytes
    assert other_dims == [(1, 1, 1)] * 2
    assert threads == (threads[0],) * 3
    assert f".reqntid {threads[0]}" in plan.ptx
    assert shared == (shared[0],) * 3
    assert shared[0] <= 48 * 1024
    input_types = [tensor.dtype for tensor in case.tensors(node).values()]
    assert plan.types == [*input_types, *(dtype for dtype, _ in plan.outputs)]


def test_tensorrt_reads_every_operations_inputs_and_attributes(tensorrt: Run) -> None:
    assert tensorrt(builder.declared) == {
        node.plugin_id: (list(node.inputs), ATTRIBUTES, list(ATTRIBUTES), len(node.outputs))
        for node in all_nodes()
    }  # fmt: skip


def expected_launches(
    case: PluginCase,
) -> dict[Node, tuple[list[tuple[str, tuple[Triple, ...]]], tuple[Triple, ...], list[Triple]]]:
    """Return the outputs, grid and integer arguments of every operation."""
    layout, single = case.layout, triple(1)
    batch, tokens, width = (triple(case.sizes[letter]) for letter in "BXP")
    heads, q_heads, dim, splits = map(triple, (layout.kv_heads, case.setting.q_heads, layout.head_dim, case.programs + 1))
    columns = context_variant(case.setting).constants["N"]
    blocks = tuple(b * -(-x * case.group // columns) for b, x in zip(batch, tokens, strict=True))
    rows, sequences = (tuple(b * x * case.setting.q_heads for b, x in zip(batch, new, strict=True)) for new in (tokens, single))
    out = DATA_TYPES[case.compute]

    def partials(*dims: Triple) -> list[tuple[str, tuple[Triple, ...]]]:
        return [("HALF", (*dims, dim)), ("FLOAT", (*dims, triple(2)))]

    return {
        PLAN: (
            [("INT32", (case.rows, triple(5))), ("INT32", (batch, triple(4)))],
            (triple(plan_grid(case.programs)), single, single),
            [batch, triple(case.programs)],
        ),
        node_of("decode_partial", layout): (partials(case.parts, q_heads), (heads, case.rows, single), [width]),
        REDUCE: ([(out, (batch, single, q_heads, dim))], (sequences, single, single), []),  # type: ignore[dict-item]
        node_of("context_partial", layout): (
            partials(batch, tokens, splits, q_heads), (blocks, heads, splits), [width, tokens]
        ),
        CONTEXT_REDUCE: ([(out, (batch, tokens, q_heads, dim))], (rows, single, single), [splits]),  # type: ignore[dict-item]
    }  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_every_operation_matches_its_kernel(name: str, tensorrt: Run) -> None:
    case = CASES[name]
    for node, (outputs, grid, extras) in expected_launches(case).items():
        assert node.operation in ("plan_work", "decode_reduce", "context_reduce") or node.plugin_id.endswith(case.suffix)
        plan = tensorrt(builder.build, node.plugin_id, case.tensors(node), case.attributes)
        assert plan.outputs == outputs
        assert plan.grid == grid
        check_kernel(plan, node, case, extras)


@pytest.mark.parametrize(
    ("name", "sinks", "recent"),
    [("fp8k_int4v", 0, 0), ("fp8k_nvfp4v", 0, 0), ("fp8_head", 4, 60), ("fp8_token", 4, 0), ("bf16", 0, 9)],
)
def test_attention_has_the_work_list_and_the_functions_inputs(name: str, sinks: int, recent: int) -> None:
    policy = SHIPPED[name].model_copy(update={"sink_tokens": sinks, "recent_tokens": recent})
    info = ModelInfo(
        compute_dtype="float16", layers=1, q_heads=8, kv_heads=2, head_dim=128, vocab_size=1, max_position_embeddings=1,
        weights_sha256="", scaling=SCALING,
    )  # fmt: skip
    spec = AttentionSpec(info, policy, layer=0)
    (layout,) = check_kernels(policy, info.shape, q_heads=8)
    node = node_of("decode_partial", layout)
    specs = input_specs(node, Setting(layout, "float16", group=4), programs=1)
    assert sorted(specs) == sorted(["query", "key", "value", *spec.tables, *PLAN.outputs, *spec.cache])
    for table, dims in spec.tables.items():
        assert specs[table] == ("int32", dims)
    for side in spec.sides.values():
        for array, (storage, width) in side.arrays.items():
            assert (DATA_TYPES[specs[array][0]], specs[array][1]) == (TENSORRT_TYPES[onnx_type(storage)], ("N", 2, 64, width))
        for constant, constant_dims in side.constants.items():
            assert specs[constant] == ("float32", constant_dims)
    if policy.exact_tokens:
        assert specs["key_exact"] == specs["value_exact"] == ("float16", ("M", 2, sinks + recent, 128))


@pytest.mark.parametrize(
    ("tensor", "dtype", "dims", "message"),
    [
        ("value_pool", "INT4", None, r"value_pool must be INT8 \(two codes per byte\), got INT4"),
        ("key_pool", "UINT8", None, "key_pool must be FP8, got UINT8"),
        ("lengths", None, (4,), r"lengths must be \(16\), got \(4\)"),
        ("key_pool", None, (4096, 8, 32, 128), r"key_pool must be \(4096, 8, 64, 128\), got \(4096, 8, 32, 128\)"),
        ("key", None, (16, 8, 1, (64, 128, 128)), r"key must be \(16, 8, 1, 128\), got \(16, 8, 1, varies\)"),
        ("value_group", None, 48, "group_size must be one of 32, 64, 128, got 48"),
        ("value_dtype", None, 6, r"value_dtype must be one of 0 \(fp16\), .* got 6"),
        ("scaling", None, 0.0, r"scaling must be positive and finite, got 0\.0"),
        ("sm", None, 75, "sm must be at least 80, got 75"),
        ("recent_tokens", None, 1, "the setting's cache needs kv::decode_partial_kstatic_vdynamic_exact"),
        ("programs", None, 0, "programs must be at least 1, got 0"),
    ],
)
def test_an_input_or_attribute_that_no_kernel_knows_is_named(
    tensor: str, dtype: str | None, dims: Any, message: str, tensorrt: Run
) -> None:
    case = CASES["fp8k_int4v"]
    node = PLAN if tensor == "programs" else node_of("decode_partial", case.layout)
    tensors, attributes = case.tensors(node), case.attributes
    if tensor in tensors:
        descriptor = tensors[tensor]
        tensors[tensor] = PluginInput(dtype or descriptor.dtype, dims or descriptor.dims)
    else:
        attributes[tensor] = dims
    with pytest.raises(ValueError, match=f"^{node.plugin_id}: {message}"):
        tensorrt(builder.build, node.plugin_id, tensors, attributes)
