"""The main loop, its cost and its model, on hand-made machine code. No kernel is compiled; test_kernel_compile.py does that."""

import json
from pathlib import Path

import pytest

from plugins.kv_attention.sass import Instruction, loop_cost, main_loop, parse
from plugins.kv_attention.scoreboard import cycles_per_iteration

LISTING = """
        Function : decode_partial
        /*0000*/                   LDG.E.128 R36, desc[UR24][R2.64] ;                           /* 0x0000001802247981 */
                                                                                                /* 0x000ea8000c1e1d00 */
        /*0010*/              @!P0 IADD3 R1, R1, 0x1, RZ ;                                      /* 0x0000000101017810 */
                                                                                                /* 0x004fca00000000d5 */
"""


def program(*lines: str, first: int = 0, **fields: int) -> list[Instruction]:
    return [Instruction(first + 16 * number, line, **fields) for number, line in enumerate(lines)]


def loop(*lines: str, first: int) -> list[Instruction]:
    return program(*lines, f"@P0 BRA 0x{first:x}", first=first)


def test_control_bits_are_read_from_the_encoding() -> None:
    load, add = parse(LISTING)
    assert (load.opcode, load.stall, load.write, load.read, load.wait) == ("LDG.E.128", 4, 2, None, 0)
    assert (add.base, add.guarded, add.stall, add.write, add.wait) == ("IADD3", True, 5, None, 0b100)


COPIES = ("LDGSTS.E.BYPASS.128 [R49], desc[UR24][R6.64], !P2", "HMMA.16816.F32 R4, R5, R6, R4", "IADD3 R1, R1, 0x1, RZ")
REGISTERS = ("LDG.E.128 R4, desc[UR24][R6.64]", "@!P5 LDG.E.128 R8, desc[UR24][R6.64]", "HMMA.16816.F32 R4, R5, R6, R4")
RAGGED = (
    "LDG.E R1, desc[UR24][R6.64]",
    *(f"@P{mask} LDG.E.128 R8, desc[UR24][R6.64]" for mask in range(4)),
    "HMMA.16816.F32 R4, R5, R6, R4",
    "HMMA.16816.F32 R4, R5, R6, R4",
)
WITHOUT_PRODUCTS = ("LDG.E.128 R4, desc[UR24][R6.64]",) * 8


@pytest.mark.parametrize("whole", [COPIES, REGISTERS])
@pytest.mark.parametrize("whole_first", [True, False])
def test_the_main_loop_is_the_one_that_loads_without_asking_for_each_row(whole: tuple[str, ...], whole_first: bool) -> None:
    order = (whole, RAGGED) if whole_first else (RAGGED, whole)
    instructions = loop(*WITHOUT_PRODUCTS, first=0x2000)
    for number, body in enumerate(order):
        instructions = [*instructions, *loop(*body, first=0x100 * (number + 1))]
    assert tuple(instruction.text for instruction in main_loop(instructions)[:-1]) == whole


def test_the_main_loop_is_an_innermost_one() -> None:
    inner = loop(*COPIES, first=0x110)
    outer = [*program("LDG.E.128 R4, desc[UR24][R6.64]", first=0x100), *inner, *program("BRA 0x100", first=0x200)]
    assert main_loop(outer) == inner


def test_without_matrix_instructions_there_is_no_main_loop() -> None:
    with pytest.raises(ValueError, match="matrix"):
        main_loop(loop(*WITHOUT_PRODUCTS, first=0))


def test_spacers_that_never_run_load_nothing() -> None:
    cost = loop_cost(program("@!PT LDS RZ, [RZ]", "@!PT LDG.E.128 R4, desc[UR24][R6.64]", *COPIES), num_warps=2, tokens=64)
    assert cost.instructions == 5
    assert cost.loads == {"LDGSTS.E.BYPASS.128": 1}
    assert cost.streamed_bytes(2) == 2 * 32 * 16


def sequence(*loads: str, wait_between: bool) -> list[Instruction]:
    """Return loads to registers, each awaited before the next one or all at the end."""
    body = []
    for number, load in enumerate(loads):
        body.append(Instruction(0, load, write=number))
        if wait_between:
            body.append(Instruction(0, "IADD3 R1, R1, 0x1, RZ", wait=1 << number))
    return [*body, Instruction(0, "IADD3 R1, R1, 0x1, RZ", wait=(1 << len(loads)) - 1), Instruction(0, "BRA 0x0", stall=5)]


def time_of(body: list[Instruction], latency: float, programs: int = 1, num_warps: int = 1) -> float:
    return cycles_per_iteration(body, programs=programs, num_warps=num_warps, latency=latency)


LOAD = "LDG.E.128 R4, desc[UR24][R6.64]"


def test_loads_in_series_take_their_latencies_added_up_and_loads_at_once_one() -> None:
    series, together = (sequence(LOAD, LOAD, LOAD, wait_between=wait) for wait in (True, False))
    assert time_of(series, 2000) - time_of(series, 1000) == 3000
    assert time_of(together, 2000) - time_of(together, 1000) == 1000


def test_programs_hide_each_others_latency_until_the_pipe_is_full() -> None:
    body = sequence(LOAD, wait_between=False)
    assert time_of(body, 1000, programs=8) < 1.1 * time_of(body, 1000)
    # Shared memory and L1 take 4 wavefronts for each load: 400 programs cannot all be served within a latency.
    assert time_of(body, 1000, programs=400) == pytest.approx(1600, rel=0.05)


def copies(groups_under_way: int) -> list[Instruction]:
    """Return a loop that copies asynchronously, and waits until so many groups are under way at most."""
    return [
        Instruction(0, f"DEPBAR.LE SB0, 0x{groups_under_way:x}"),
        *(Instruction(0, "IADD3 R1, R1, 0x1, RZ", stall=15) for _ in range(100)),
        Instruction(0, "LDGSTS.E.BYPASS.128 [R49], desc[UR24][R6.64]"),
        Instruction(0, "LDGDEPBAR", write=0),
        Instruction(0, "BRA 0x0", stall=5),
    ]


def test_a_copy_that_is_awaited_an_iteration_later_is_hidden_behind_the_work() -> None:
    work = time_of(copies(1), 1)
    assert work > 1500
    assert time_of(copies(1), 1400) == pytest.approx(work, rel=0.01)
    assert time_of(copies(0), 1400) > 1.8 * work
    # Two copies under way, and one iteration of work, share a longer latency.
    assert time_of(copies(1), 6000) == pytest.approx((6000 + work) / 2, rel=0.01)


def test_the_warps_of_a_program_wait_for_each_other_at_a_barrier() -> None:
    slow = [Instruction(0, LOAD, write=0), Instruction(0, "BAR.SYNC.DEFER_BLOCKING 0x0", wait=1)]
    body = [*slow, *(Instruction(0, "HMMA.16816.F32 R4, R5, R6, R4") for _ in range(50)), Instruction(0, "BRA 0x0")]
    one, eight = time_of(body, 1000), time_of(body, 1000, num_warps=8)
    # Two warps share each scheduler's tensor core, and all wait for the slower one.
    assert eight - one == pytest.approx(50 * 8, rel=0.2)


ROOT = Path(__file__).resolve().parents[2]
SASS = json.loads((ROOT / "benchmarks" / "results" / "sass.json").read_text(encoding="utf-8"))
MATRIX = json.loads((ROOT / "benchmarks" / "results" / "compile_matrix.json").read_text(encoding="utf-8"))["results"]
NAMES = {
    "fp8k_int4v": "fp8 keys, int4 values",
    "fp8k_nvfp4v": "fp8 keys, nvfp4 values",
    "int8k_int4v": "int8 keys, int4 values",
    "fp8": "fp8",
    "int8": "int8, one scale per token",
    "bf16": "bf16",
}


def test_the_recorded_matrix_is_whole_and_nothing_in_it_spills() -> None:
    kernels = {"decode", "plan", "reduce", "append", "context chunk", "context drafts", "context_reduce"}
    assert {row["kernel"] for row in MATRIX} == kernels
    assert len(MATRIX) == 2 * 4 * len(kernels) * len(NAMES)
    assert {row["triton"] for row in MATRIX} == {"3.6.0", "3.7.1"}
    assert all(row["spills"] == 0 and row["shared_bytes"] <= 48 * 1024 for row in MATRIX)


@pytest.mark.parametrize("policy", NAMES)
@pytest.mark.parametrize("triton", ["3.6.0", "3.7.1"])
def test_the_readme_shows_the_recorded_matrix(policy: str, triton: str) -> None:
    cells = {
        row["sm"]: f"{row['registers']}; {row['cycles_per_token_head']:.1f}"
        for row in MATRIX
        if (row["triton"], row["kernel"], row["policy"]) == (triton, "decode", policy)
    }
    line = f"| {NAMES[policy]} | {triton} | {' | '.join(cells[sm] for sm in (80, 89, 90, 100))} |"
    assert line in (ROOT / "plugins" / "README.md").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("policy", NAMES)
def test_the_readme_shows_what_is_recorded_of_the_context_kernel(policy: str) -> None:
    chunk, drafts = (
        next(row for row in SASS["context"] if (row["policy"], row["head_dim"], row["work"]) == (policy, 128, work))
        for work in ("chunk", "drafts")
    )
    assert chunk["spills"] == drafts["spills"] == 0
    cells = [
        *(str(chunk["registers"]), f"{chunk['shared_bytes'] / 1024:.0f}"),
        *(f"{chunk['cycles_by_pipe'][pipe]:.1f}" for pipe in ("issue", "tensor", "shared")),
        *(str(chunk["pipes_tflop_per_s"]), str(drafts["registers"]), f"{drafts['shared_bytes'] / 1024:.0f}"),
        *(f"{drafts['ceiling_tb_per_s'][latency]:.1f}" for latency in ("1000", "1300")),
    ]
    line = f"| {NAMES[policy]} | {' | '.join(cells)} |"
    assert line in (ROOT / "plugins" / "README.md").read_text(encoding="utf-8").splitlines()
