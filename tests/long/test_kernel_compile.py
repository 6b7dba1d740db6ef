"""The kernels compile for every target without a GPU, in a subprocess, because this process interprets kernels."""

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from helpers.kernels.cases import side

from plugins.kv_attention import aot
from plugins.kv_attention.layout import CacheLayout
from plugins.kv_attention.variants import Compute, Setting, decode_variant

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class CompileCase:
    """A decode kernel. Formats are written in the notation of `side`."""

    key: str
    value: str
    head_dim: int
    group: int
    query_dtype: Compute
    sm: int
    exact: tuple[int, int] = (0, 0)

    def __str__(self) -> str:
        return f"{self.key}-{self.value}-D{self.head_dim}-G{self.group}-{self.query_dtype}-sm{self.sm}-{sum(self.exact)}"

    @property
    def layout(self) -> CacheLayout:
        return CacheLayout(8, self.head_dim, side(self.key), side(self.value), *self.exact)

    def setting(self, rows: int = 1) -> Setting:
        return Setting(self.layout, self.query_dtype, self.sm, self.group, 0.1, rows)


HEADLINE = CompileCase("fp8_e4m3 tensor", "int4 64", 128, 8, "bfloat16", 90)
FP8 = CompileCase("fp8_e4m3 tensor", "fp8_e4m3 tensor", 128, 8, "bfloat16", 90)
NVFP4 = CompileCase("fp8_e4m3 tensor", "nvfp4 16", 128, 8, "bfloat16", 90)
COPIED_ASYNC = (HEADLINE, FP8, NVFP4)
"""Cases whose codes are copied asynchronously."""
CASES = (
    *COPIED_ASYNC,
    replace(HEADLINE, sm=100),
    CompileCase("fp8_e4m3 token", "int4 32", 128, 16, "float16", 90, (4, 60)),
    CompileCase("int8 head", "int4 token", 64, 5, "bfloat16", 80),
    CompileCase("fp8_e4m3 token", "int8 tensor", 256, 8, "bfloat16", 89, (0, 32)),
    CompileCase("bf16", "bf16", 128, 8, "bfloat16", 90),
    CompileCase("bf16", "int4 128", 256, 16, "float16", 100, (0, 32)),
    CompileCase("int8 token", "fp8_e4m3 head", 64, 16, "float32", 100),
    # groups smaller than the number of channels that a thread loads
    CompileCase("fp16", "int4 32", 256, 1, "float16", 80),
    CompileCase("fp8_e4m3 head", "nvfp4 16", 256, 16, "float32", 80, (4, 60)),
)
CHUNKS = (
    (HEADLINE, 8192),
    (CompileCase("fp8_e4m3 token", "int4 32", 128, 16, "float32", 90, (4, 60)), 8192),
    (CompileCase("int8 token", "int8 token", 64, 4, "float16", 80), 4096),
    (CompileCase("fp8_e4m3 head", "fp8_e4m3 tensor", 256, 1, "float16", 89, (0, 32)), 16),
)
"""Kernels for several new tokens, and the typical number of query rows of a sequence."""

WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}
"""Bytes per thread of a load, by the opcode's last modifier; all other loads have 4 bytes."""


def assemble(ptx: str) -> tuple[list[str], int]:
    """Compile PTX with one entry by Triton's ptxas. Return the opcodes of its global loads (LDG.E.128, LDGSTS.E, ...) and its
    spilled bytes."""
    import triton
    from triton import knobs

    target = re.findall(r"^\.target (sm_(\d+)\w*)", ptx, re.MULTILINE)[0]
    assembler = knobs.nvidia.ptxas_blackwell if int(target[1]) >= aot.NEWER_PTX else knobs.nvidia.ptxas
    assert Path(assembler.path).is_relative_to(Path(triton.__file__).parent)
    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        command = [assembler.path, "-v", f"-arch={target[0]}", str(source), "-o", str(out)]
        messages = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        command = [knobs.nvidia.cuobjdump.path, "-sass", str(out)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", messages)
    assert spills, messages
    # ptxas emits padding before copies: loads whose predicate (`@!PT`) is always false, which load nothing.
    lines = [line for line in text.splitlines() if "@!PT" not in line]
    return re.findall(r"\b((?:LDGSTS|LDG)[.\w]*)", "\n".join(lines)), sum(map(int, spills))


def loaded_bytes(loads: list[str], num_warps: int, *patterns: str) -> int:
    """Return the bytes that a block loads by opcodes matching one of the patterns, if each instruction runs once."""
    matching = [name for name in loads if re.match("|".join(patterns), name)]
    return 32 * num_warps * sum(WIDTHS.get(name.split(".")[-1], 4) for name in matching)


WITH_EXACT = next(case for case in CASES if sum(case.exact)).setting()
WIDE = Setting(CacheLayout(8, 256, side("fp16"), side("fp16")), "float32", 80, 8)
KERNELS: dict[str, tuple[str, Setting]] = {
    **{str(case): ("decode_partial", case.setting()) for case in CASES},
    **{f"{case}-{rows}": ("context_partial", case.setting(rows)) for case, rows in CHUNKS},
    "append": ("append", WITH_EXACT),
    "plan": ("plan_work", HEADLINE.setting()),
    "plan_exact": ("plan_work", WITH_EXACT),
    "reduce": ("decode_reduce", HEADLINE.setting()),
    "reduce_wide": ("decode_reduce", WIDE),
    "join": ("context_reduce", HEADLINE.setting()),
}
"""Operation and setting of every kernel that is compiled. test_tensorrt_plugin.py compares the names of the parameters."""

PROGRAM = """
import json
from plugins.kv_attention import aot
from tests.long.test_kernel_compile import KERNELS, assemble, loaded_bytes

results = {}
for name, (operation, setting) in KERNELS.items():
    kernel = aot.compile_operation(operation, setting)
    loads, spill_bytes = assemble(kernel.ptx)
    copied = loaded_bytes(loads, kernel.num_warps, "LDGSTS")
    streamed = loaded_bytes(loads, kernel.num_warps, "LDGSTS", r"LDG\\.E\\.128$")
    results[name] = {
        "name": kernel.name, "ptx": kernel.ptx, "shared_bytes": kernel.shared_bytes, "spill_bytes": spill_bytes,
        "streamed_bytes": streamed, "copied_bytes": copied, "parameters": kernel.parameters,
    }
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    removed = ("TRITON_INTERPRET", "TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH")
    environment = {name: value for name, value in os.environ.items() if name not in removed}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")), "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def entry_parameters(ptx: str) -> list[str]:
    """Return the PTX types of the parameters that a launch must pass."""
    entry = re.search(r"\.visible \.entry \w+\((.*?)\)", ptx, re.DOTALL)
    assert entry is not None
    return re.findall(r"\.param \.(\w+)", entry[1])


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_has_only_its_own_parameters_and_fits(name: str, compiled: dict[str, Any]) -> None:
    kernel = compiled[name]
    widths = ["u32" if kind == "i32" else "u64" for _, kind in kernel["parameters"]]
    assert entry_parameters(kernel["ptx"]) == widths
    assert f".entry {kernel['name']}(" in kernel["ptx"]
    assert kernel["spill_bytes"] == 0
    assert kernel["shared_bytes"] <= aot.SHARED_LIMIT


@pytest.mark.parametrize("case", CASES, ids=str)
def test_decode_loads_all_codes_by_wide_loads_and_its_programs_fit(case: CompileCase, compiled: dict[str, Any]) -> None:
    kernel, variant = compiled[str(case)], decode_variant(case.setting())
    codes = sum(stored.code_bytes(case.head_dim) for stored in (case.layout.key, case.layout.value))
    assert kernel["copied_bytes" if case in COPIED_ASYNC else "streamed_bytes"] >= variant.constants["T"] * codes
    assert variant.resident * (1024 + -(-kernel["shared_bytes"] // 128) * 128) <= variant.sm_shared
    version = re.search(r"^\.version (\S+)", kernel["ptx"], re.MULTILINE)
    assert version is not None
    assert (int(version[1].replace(".", "")) == aot.PORTABLE_PTX) == (case.sm < aot.NEWER_PTX)


def test_stripping_a_used_parameter_is_refused() -> None:
    ptx = ".visible .entry f(\n\t.param .u64 f_param_0,\n\t.param .u64 f_param_1\n)\n{\n\tld.param.u64 %rd1, [f_param_1];\n}"
    with pytest.raises(RuntimeError, match="f_param_1"):
        aot.strip_hidden_parameters(ptx, 1)
    assert entry_parameters(aot.strip_hidden_parameters(ptx.replace("[f_param_1]", "[f_param_0]"), 1)) == ["u64"]
