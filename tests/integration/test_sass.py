"""The main loop and its counts, on hand-made machine code. No kernel is compiled; test_kernel_compile.py does that."""

import pytest

from plugins.kv_attention.sass import Instruction, count, main_loop, parse

LISTING = """
        Function : decode_partial
        /*0000*/                   LDG.E.128 R36, desc[UR24][R2.64] ;                           /* 0x0000001802247981 */
                                                                                                /* 0x000ea8000c1e1d00 */
        /*0010*/              @!P0 IADD3 R1, R1, 0x1, RZ ;                                      /* 0x0000000101017810 */
                                                                                                /* 0x004fca00000000d5 */
"""


def program(*lines: str, first: int = 0) -> list[Instruction]:
    return [Instruction(first + 16 * number, line) for number, line in enumerate(lines)]


def loop(*lines: str, first: int) -> list[Instruction]:
    return program(*lines, f"@P0 BRA 0x{first:x}", first=first)


def test_instructions_are_read_from_the_listing() -> None:
    load, add = parse(LISTING)
    assert (load.address, load.opcode, load.copied_bytes) == (0, "LDG.E.128", 32 * 16)
    assert (add.address, add.base, add.guarded) == (16, "IADD3", True)


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
    loop = count(program("@!PT LDS RZ, [RZ]", "@!PT LDG.E.128 R4, desc[UR24][R6.64]", *COPIES))
    assert loop.instructions == 5
    assert loop.loads == {"LDGSTS.E.BYPASS.128": 1}
    assert loop.streamed_bytes(2) == 2 * 32 * 16
