"""The kernels on a real GPU: in CUDA graphs, without waiting for the host; and a short run of the benchmark.

tests/integration/plugins/test_kernel_{append,attention,plan}.py check the results of the kernels. They run on the GPU
if there is one, and in Triton's interpreter otherwise.
"""

import json
from ctypes import CDLL, byref, c_int, c_size_t, c_void_p
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.kernels.cases import no_waiting, side
from torch import Tensor

from plugins.kv_attention import launch
from plugins.kv_attention.kernels.decode import decode_partial
from plugins.kv_attention.layout import CacheLayout
from plugins.kv_attention.variants import decode_variant

pytestmark = pytest.mark.gpu

LAYERS, BATCH, COLUMNS, BUFFERS, GROUP = 3, 4, 20, 5, 4
LAYOUTS = {
    "fp8k_int4v": CacheLayout(4, 128, side("fp8_e4m3 tensor"), side("int4 64")),
    "fp8k_nvfp4v": CacheLayout(4, 128, side("fp8_e4m3 tensor"), side("nvfp4 16")),
    "guarded": CacheLayout(4, 128, side("int8 token"), side("int4 32"), sink_tokens=4, recent_tokens=70),
    "bf16": CacheLayout(4, 64, side("bf16"), side("bf16")),
}
LENGTHS = [[0, 1, 64, 1000], [1279, 65, 0, 127]]


class Decoder:
    """A cache of LAYERS layers on the GPU and a step over it: attention in every layer, then one append for all layers."""

    def __init__(self, layout: CacheLayout) -> None:
        rng = torch.Generator("cuda").manual_seed(0)
        specs = layout.pools(BATCH * COLUMNS) | layout.exact_buffers(BUFFERS) | layout.static_scales()
        self.cache = {name: self._filled(*spec, rng) for name, spec in specs.items()}
        self.page_table = torch.randperm(BATCH * COLUMNS, generator=rng, device="cuda").view(BATCH, COLUMNS).int()
        self.lengths = torch.zeros(BATCH, dtype=torch.int32, device="cuda")
        self.layout, self.slots = layout, torch.arange(BATCH, dtype=torch.int32, device="cuda")
        heads = (layout.kv_heads * GROUP, layout.kv_heads, layout.kv_heads)
        self.inputs = [torch.randn(LAYERS, BATCH, h, layout.head_dim, generator=rng, device="cuda").bfloat16() for h in heads]

    @staticmethod
    def _filled(dtype: str, shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
        x = torch.randn(LAYERS, *shape, generator=rng, device="cuda")
        if dtype in ("float32", "float16", "float8_e4m3fn") and shape[-1] < 32:  # scales
            x = x.abs() * 0.01 + 0.01
        return ((x * 40).clamp(-127, 127) if dtype == "int8" else x).to(getattr(torch, dtype))

    def step(self) -> Tensor:
        """Run one step; return the attention output (LAYERS, BATCH, Hq, D)."""
        tables: dict[str, Any] = {"page_table": self.page_table, "lengths": self.lengths, "exact_slots": self.slots}
        outs, (query, key, value) = [], self.inputs
        programs = launch.default_programs(self.layout, query[0], self.page_table, 0.1)
        plan = launch.plan_decode(self.layout, self.lengths, programs=programs)
        for layer, new in enumerate(zip(query, key, value, strict=True)):
            cache = {name: tensor[layer] for name, tensor in self.cache.items()}
            outs.append(launch.decode_attention(self.layout, *new, cache, plan=plan, scaling=0.1, **tables))
        launch.append(self.layout, key, value, self.cache, **tables)
        return torch.stack(outs)

    def show(self, lengths: list[int], seed: int) -> None:
        """Write other sequences and tokens to the same addresses."""
        rng = torch.Generator("cuda").manual_seed(seed)
        self.lengths.copy_(torch.tensor(lengths, dtype=torch.int32))
        self.page_table.copy_(torch.randperm(BATCH * COLUMNS, generator=rng, device="cuda").view(BATCH, COLUMNS))
        for x in self.inputs:
            x.normal_(generator=rng)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_captured_step_replays_with_other_tokens(name: str) -> None:
    captured, eager = Decoder(LAYOUTS[name]), Decoder(LAYOUTS[name])
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        captured.step()
    torch.cuda.current_stream().wait_stream(stream)
    eager.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = captured.step()
    for seed, lengths in enumerate(LENGTHS):
        for decoder in (captured, eager):
            decoder.show(lengths, seed)
        out.fill_(torch.nan)
        with no_waiting():
            graph.replay()
            expected = eager.step()
        assert torch.equal(out, expected)
        assert out.isfinite().all()
        for array, tensor in captured.cache.items():
            assert torch.equal(tensor.view(torch.uint8), eager.cache[array].view(torch.uint8)), array


class Launched:
    """A decode_partial that keeps the compiled kernel of its last launch."""

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*arguments: Any, **options: Any) -> None:
            self.kernel = decode_partial[grid](*arguments, **options)

        return run


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_programs_of_a_launch_run_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launched, decoder = Launched(), Decoder(LAYOUTS[name])
    monkeypatch.setattr(launch, "decode_partial", launched)
    decoder.step()
    variant = decode_variant(launch.make_setting(decoder.layout, decoder.inputs[0][0], 0.1))
    resident, shared = c_int(0), c_size_t(launched.kernel.metadata.shared)
    of_a_multiprocessor = CDLL("libcuda.so.1").cuOccupancyMaxActiveBlocksPerMultiprocessor
    assert of_a_multiprocessor(byref(resident), c_void_p(launched.kernel.function), 32 * variant.num_warps, shared) == 0
    assert resident.value >= variant.resident


def test_the_benchmark_runs_and_every_kernel_is_correct(tmp_path: Path) -> None:
    from benchmarks import decode_attention

    file = tmp_path / "results.json"
    sizes = ["--batches", "3", "--tokens", "1k,1100", "--groups", "4", "--ragged", ""]
    code = decode_attention.main(["--json", str(file), *sizes, "--kernels", "fp8k_int4v,fp8,bf16"])
    assert code in (0, 3)  # a target may be missed at these sizes, or lack a comparison
    content = json.loads(file.read_text())
    assert len(content["results"]) == 2 * 3
    assert content["copy_gb_per_s"] > 0
    assert content["gpu"]["name"] == torch.cuda.get_device_name()
    assert all(row["correct"] for row in content["results"])
