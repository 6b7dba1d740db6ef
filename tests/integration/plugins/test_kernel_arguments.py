"""The kernels, called with the arguments of an ahead-of-time launch by the TensorRT plugin.

On a GPU, cupy launches the plugin's PTX through the driver, without TensorRT. Otherwise Triton's interpreter runs.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.kernels.cases import DEVICE, KernelCase, differs, on_device, side
from torch import Tensor

from plugins.kv_attention import aot, launch
from plugins.kv_attention.layout import CacheLayout
from plugins.kv_attention.variants import append_variant, plan_grid, work_rows

LENGTHS, SCALING, PROGRAMS = [1, 70], 0.1, 3
LAYOUTS = {
    "fp8k_nvfp4v": CacheLayout(2, 128, side("fp8_e4m3 tensor"), side("nvfp4 16")),
    "guarded": CacheLayout(2, 128, side("int8 token"), side("int4 32"), sink_tokens=4, recent_tokens=60),
    "bf16": CacheLayout(2, 64, side("bf16"), side("bf16")),
}


class Plugin:
    """Launches of the plugin's kernels for one layout."""

    def __init__(self, layout: CacheLayout, query: Tensor, folder: Path) -> None:
        self.setting, self.folder = launch.make_setting(layout, query, SCALING), folder

    def run(self, operation: aot.Kernel, grid: tuple[int, ...], named: Mapping[str, Any]) -> None:
        """Launch a kernel. `named`: parameter name -> tensor or integer."""
        if DEVICE == "cpu":
            self.interpret(operation, grid, named)
            return
        cupy = pytest.importorskip("cupy", reason="cupy launches PTX without TensorRT")
        kernel = aot.compile_operation(operation, self.setting)
        file = self.folder / f"{kernel.name}.ptx"  # cupy would take `code` for CUDA C++
        file.write_text(kernel.ptx)
        function = cupy.RawModule(path=str(file)).get_function(kernel.name)
        arguments = tuple(self.argument(name, kind, named) for name, kind in kernel.parameters)
        function((*grid, 1, 1)[:3], (32 * kernel.num_warps, 1, 1), arguments, shared_mem=kernel.shared_bytes)
        torch.cuda.synchronize()

    def interpret(self, operation: aot.Kernel, grid: tuple[int, ...], named: Mapping[str, Any]) -> None:
        kernel, specialise = aot.KERNELS[operation]
        types, variant = aot.parameter_types(operation, self.setting), specialise(self.setting)
        kinds = {name: types[name] for name in kernel.arg_names if name not in variant.constants}
        arguments = {name: kind and launch_value(named[name]) for name, kind in kinds.items()}
        kernel[grid](**arguments, **variant.constants, **variant.options)

    @staticmethod
    def argument(name: str, kind: str, named: Mapping[str, Any]) -> Any:
        """Return an argument for the driver: an address, or an int32."""
        value = named[name]
        if kind == "i32":
            return np.int32(value)
        assert value.is_contiguous(), name
        return np.uint64(value.data_ptr())


def launch_value(value: Any) -> Any:
    return launch.as_bytes(value) if isinstance(value, Tensor) else value


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_step_with_plugin_arguments_equals_torch_launches(name: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    case = KernelCase(layout, LENGTHS)
    cache, tables = on_device(case.cache), on_device(case.step)
    query, key_new, value_new = (tables.pop(name) for name in ("query", "key_new", "value_new"))
    page_table, lengths = tables["page_table"], tables["lengths"]
    batch, q_heads, dim = query.shape
    plugin, rows = Plugin(layout, query, tmp_path), work_rows(PROGRAMS, batch, exact=layout.exact_tokens > 0)
    plan = launch.plan_decode(layout, lengths, programs=PROGRAMS)
    plugin_plan = launch.DecodePlan(torch.full_like(plan.work, -7), torch.full_like(plan.sequences, -7))
    step = {"work": plugin_plan.work, "sequences": plugin_plan.sequences, "table_width": page_table.shape[1], **tables}
    plugin.run("plan_work", (plan_grid(PROGRAMS),), {**step, "batch": batch, "programs": PROGRAMS})
    assert torch.equal(plugin_plan.work, plan.work)
    assert torch.equal(plugin_plan.sequences, plan.sequences)

    launched = launch.decode_attention(layout, query, key_new, value_new, cache, plan=plan, scaling=SCALING, **tables)
    step |= {"query": query, "key_new": key_new, "value_new": value_new, "out": torch.full_like(query, torch.nan)}
    step["partial_acc"] = query.new_empty((rows + batch, q_heads, dim), dtype=launch.partial_type(query.dtype))
    step["partial_ml"] = query.new_empty((rows + batch, q_heads, 2), dtype=torch.float32)
    scales = dict(zip(("key_scale", "value_scale", "value_block_scale"), launch.scale_inputs(layout, cache), strict=True))
    plugin.run("decode_partial", (layout.kv_heads, rows), cache | step | scales)
    plugin.run("decode_reduce", (q_heads, batch), step)
    torch.testing.assert_close(step["out"], launched, rtol=1e-2, atol=1e-3)

    layered = {name: tensor[None].contiguous() for name, tensor in cache.items()}
    expected = {name: tensor.clone() for name, tensor in layered.items()}
    new = {"key_new": key_new[None].contiguous(), "value_new": value_new[None].contiguous()}
    # These lengths have pages already. Nothing is appended before the first token.
    tables["lengths"] = step["lengths"] = lengths - 1
    launch.append(layout, new["key_new"], new["value_new"], expected, **tables)
    step |= {"pages": layered["key_pool"].shape[1], "buffers": batch + 1}
    heads = append_variant(plugin.setting).constants["R"]
    plugin.run("append", (-(-layout.kv_heads // heads), batch, 1), layered | step | new)
    for array, tensor in layered.items():
        assert not differs(tensor, expected[array].cpu()).any(), array
