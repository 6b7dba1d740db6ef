"""The context kernels compile for every target without a GPU, in one subprocess, because kernels are interpreted in this
process."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_kernel_compile import Case, assert_a_plain_launch_runs

ROOT = Path(__file__).resolve().parents[2]

INPUTS = ("query", "key_new", "value_new", "key_pool", "value_pool", "key_scale", "value_scale", "page_table", "lengths")
EXACT_INPUTS = ("key_exact", "value_exact", "exact_slots")

CASES = (
    (Case("fp8_e4m3 per_tensor", "int4 per_group 64", 128, 8, "bfloat16", 90), 8192),
    (Case("fp8_e4m3 per_tensor", "int4 per_group 64", 128, 8, "bfloat16", 90), 16),
    (Case("fp8_e4m3 per_token", "int4 per_group 32", 128, 16, "float32", 90, (4, 60)), 8192),
    (Case("int8 per_token", "int8 per_token", 64, 4, "float16", 80), 4096),
    (Case("fp8_e4m3 per_token", "fp8_e4m3 per_token", 256, 8, "float16", 89), 4096),
    (Case("fp8_e4m3 per_head", "fp8_e4m3 per_tensor", 128, 1, "float16", 80, (0, 32)), 16),
    (Case("bf16", "bf16", 128, 8, "bfloat16", 90), 8192),
    (Case("fp16", "fp16", 256, 8, "float32", 90), 8192),
    (Case("bf16", "int4 per_group 128", 256, 16, "float16", 100, (0, 32)), 8192),
    (Case("int8 per_token", "int4 per_group 32", 128, 8, "bfloat16", 100), 8192),
)
"""Kernels, and the query rows that a sequence is likely to have."""

PROGRAM = """
import json
from plugins.kv_attention import aot
from tests.long.test_context_compile import CASES

def described(kernel):
    return {"name": kernel.name, "ptx": kernel.ptx, "cubin": len(kernel.cubin), "shared_bytes": kernel.shared_bytes,
            "spill_bytes": kernel.spill_bytes, "registers": kernel.registers, "parameters": kernel.parameters}

partial = [
    described(aot.compile_context(
        case.layout, group=case.group, rows=rows, query_dtype=case.query_dtype, scaling=0.1, sm=case.sm
    )) for case, rows in CASES
]
join = described(aot.compile_join(CASES[0][0].layout, splits=2, out_dtype="bfloat16", sm=90))
print(json.dumps({"partial": partial, "join": join}))
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "long")])
    environment |= {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")), "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda i: f"{CASES[i][0]}-{CASES[i][1]}")
def test_a_chunk_takes_inputs_extras_and_outputs_alone_and_fits(compiled: dict[str, Any], number: int) -> None:
    layout = CASES[number][0].layout
    absent = {f"{name}_scale" for name, stored in (("key", layout.key), ("value", layout.value)) if stored.exact}
    inputs = [name for name in INPUTS if name not in absent]
    exact = EXACT_INPUTS if layout.exact_tokens else ()
    assert_a_plain_launch_runs(
        compiled["partial"][number], [*inputs, *exact, "table_width", "tokens", "partial_acc", "partial_ml"]
    )


def test_the_join_takes_inputs_extras_and_outputs_alone(compiled: dict[str, Any]) -> None:
    assert_a_plain_launch_runs(compiled["join"], ["partial_acc", "partial_ml", "splits", "out"])
