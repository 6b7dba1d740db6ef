"""The compiled attention kernel against the graph function that it replaces, and how it is compiled and chosen."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.engines.attention import AttentionCase, Heads
from helpers.engines.random_llama import BY_NAME, POLICIES, fmt, make_engine
from helpers.policies.formats import add_int2

from stages.core.errors import MissingRequirement, UserError
from stages.engines.bundle import open_bundle
from stages.engines.onnx.backend import OnnxBackend
from stages.engines.onnx.bundle import BACKEND, Bundle
from stages.engines.onnx.config import OnnxRuntimeConfig
from stages.engines.onnx.engine import GraphSession
from stages.engines.onnx.native import compiler
from stages.engines.onnx.native.compiler import Compiler, compiled_kernel, find_compiler
from stages.engines.onnx.native_rewrite import refusals, use_kernel
from stages.policies.policy import KVPolicy

LENGTHS = (1, 63, 64, 65, 128, 190, 300, 700)
"""Lengths around page ends: windows of 64 or 128 tokens have one or several pages, and sequences 1 to 3 units of 4 pages."""
CHUNK = 145
"""Tokens of a prompt's chunk: blocks of 64, and a last block of 17."""
HEADS = Heads(4, 2, 64)
ROUNDING = 2e-5
"""Allowed difference from the order of float32 sums, relative to the largest result: measured 1.1e-5 in E5M2, whose random keys
have large scores, and 2e-6 in other formats."""
CHUNK_ROUNDING = 3e-5
"""Allowed difference for a chunk, larger because a chunk has 145 results per sequence."""

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C compiler, or no AVX2")


def difference(case: AttentionCase) -> float:
    """Return the kernel's largest difference from the graph function, relative to the largest result."""
    native, body = (case.session(native=native).run() for native in (True, False))
    assert np.isfinite(body).all()
    return float(np.abs(native.astype(np.float32) - body).max() / np.abs(body).max())


@pytest.mark.every
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_the_kernel_equals_the_functions_body(policy: KVPolicy) -> None:
    assert difference(AttentionCase(policy, HEADS, LENGTHS)) < ROUNDING
    assert difference(AttentionCase(policy, HEADS, (1, 190, 300), tokens=CHUNK)) < CHUNK_ROUNDING


@pytest.mark.parametrize(
    ("heads", "name"),
    [
        (Heads(5, 1, 96), "int4_asym"),  # five queries, which do not all fit into registers at once; three vectors per half
        (Heads(5, 1, 96), "fp8"),
        (Heads(5, 1, 96), "nvfp4"),
        (Heads(5, 1, 96), "int4_g32"),  # three groups: the middle one has channels in low and in high nibbles
        (Heads(2, 2, 128), "int4_g128"),
        (Heads(2, 2, 128), "int4_hadamard"),
        (Heads(2, 2, 16), "fp8_token"),  # one vector
    ],
)
def test_other_heads_equal_the_functions_body(heads: Heads, name: str) -> None:
    policy = BY_NAME.get(name) or KVPolicy(name=name, key=fmt("int4", "per_group", group_size=128), value=BY_NAME["int4"].value)
    assert difference(AttentionCase(policy, heads, (1, 70, 129))) < ROUNDING
    assert difference(AttentionCase(policy, heads, (70,), tokens=CHUNK)) < CHUNK_ROUNDING


def test_a_long_context_equals_the_functions_body() -> None:
    # measured 1.1e-5, with this number of terms
    assert difference(AttentionCase(BY_NAME["fp8k_int4v"], HEADS, (20_001,))) < ROUNDING


@pytest.mark.parametrize("tokens", [1, CHUNK])
def test_float16_kernel_is_closer_to_float32_than_the_graph(tokens: int) -> None:
    """Scores around 1 in float16 are off by 2**-11. The kernel computes in float32 and rounds only inputs and results."""
    case = AttentionCase(BY_NAME["fp8k_int4v"], HEADS, LENGTHS, compute="float16", tokens=tokens)
    single = AttentionCase(BY_NAME["fp8k_int4v"], HEADS, LENGTHS, tokens=tokens)
    single.inputs |= {name: case.inputs[name].astype(np.float32) for name in ("query", "key", "value")}
    exact = single.session(native=True).run()
    native, body = (np.abs(case.session(native=native).run() - exact).max() for native in (True, False))
    assert native < 2**-10 * np.abs(exact).max()
    assert native <= body


@pytest.mark.parametrize("tokens", [1, CHUNK])
@pytest.mark.parametrize("name", ["fp8", "int4_g32", "ages"])
def test_threads_and_other_sequences_do_not_change_a_bit(name: str, tokens: int) -> None:
    case = AttentionCase(BY_NAME[name], HEADS, LENGTHS, tokens=tokens)
    single = case.session(native=True, threads=1).run()
    np.testing.assert_array_equal(case.session(native=True, threads=2).run(), single)
    for row in (2, 7):
        alone = AttentionCase(BY_NAME[name], HEADS, LENGTHS[row : row + 1], tokens=tokens)
        by_row = {"query", "key", "value", *case.spec.tables}
        alone.inputs = {key: value[row : row + 1] if key in by_row else value for key, value in case.inputs.items()}
        np.testing.assert_array_equal(alone.session(native=True).run()[0], single[row])


def test_non_finite_inputs_affect_only_their_sequence() -> None:
    case = AttentionCase(BY_NAME["int8"], HEADS, (65, 65, 65, 65))
    sound = case.session(native=True).run().copy()
    case.inputs["query"][0, 0] = np.nan
    case.inputs["key"][1, 0] = np.nan
    case.inputs["value"][2, 1, 0, 5] = np.inf
    out = case.session(native=True).run()
    assert np.isnan(out[0, 0, 0]).all()
    np.testing.assert_array_equal(out[0, 0, 1:], sound[0, 0, 1:])
    assert np.isnan(out[1, 0, :2]).all()
    np.testing.assert_array_equal(out[1, 0, 2:], sound[1, 0, 2:])
    assert np.isinf(out[2, 0, 2:, 5]).all()
    np.testing.assert_array_equal(out[3], sound[3])


@pytest.mark.parametrize("name", ["fp16", "fp8_token", "int4_asym", "recent"])
def test_arrays_need_no_alignment_beyond_their_elements(name: str) -> None:
    case = AttentionCase(BY_NAME[name], HEADS, LENGTHS)
    expected = case.session(native=True).run()
    for key, values in case.inputs.items():
        moved = np.empty(values.nbytes + 128, np.uint8)
        start = -moved.ctypes.data % 64 + values.itemsize
        case.inputs[key] = moved[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
        case.inputs[key][...] = values
    np.testing.assert_array_equal(case.session(native=True).run(), expected)


def test_unsupported_layers_keep_their_graphs_and_are_listed(
    decoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_int2(monkeypatch)
    int2, int4 = fmt("int2", "per_token"), BY_NAME["int4"].key
    override: dict[str, Any] = {"layers": (1,), "key": int2, "value": None}
    policy = KVPolicy.model_validate({"name": "mixed", "key": int4, "value": int4, "overrides": (override,)})
    engine = make_engine(decoder, tmp_path / "bundle", policy, attention="native")
    engine.generate([[1, 2, 3]], 2, ())
    assert engine.attention == "native in 1 of 2 layers"
    described, _, _ = open_bundle(tmp_path / "bundle", Bundle, BACKEND)
    assert refusals(described.model, policy) == {1: "kv.overrides.0.key.dtype=int2 is not supported by the kernel"}
    for dim, name, reason in ((24, "fp16", "head_dim 24 is not a multiple of 16"), (16, "int4", "not a multiple of 32")):
        assert reason in refusals(described.model.model_copy(update={"head_dim": dim}), BY_NAME[name])[0]


@pytest.mark.parametrize("tokens", [1, CHUNK])
@pytest.mark.parametrize("name", ["page_table", "exact_slots", "lengths", "window_table"])
def test_a_page_number_outside_the_pool_is_refused(name: str, tokens: int) -> None:
    """Test untrusted graphs: a bundle's graph may compute the attention's inputs in any way."""
    case = AttentionCase(BY_NAME["ages"], HEADS, (200, 300), tokens=tokens)
    session = case.session(native=True)
    for outside in (1 << 20, -1):
        case.inputs[name][-1] = outside
        with pytest.raises(Exception, match="a block table names a page outside of its pool"):
            session.run()


@pytest.mark.parametrize("name", ["query", "value", "value_pool", "value_scale_pool", "key_scale", "key_exact"])
def test_an_input_of_another_shape_is_refused(name: str) -> None:
    case = AttentionCase(BY_NAME["ages"], HEADS, (200, 300))
    case.inputs[name] = np.concatenate([case.inputs[name]] * 2, axis=1)
    graph = case.graph()
    for value in graph.graph.input:
        if value.name == name:
            value.type.tensor_type.shape.dim[1].dim_value *= 2
    case.graph = lambda: graph  # type: ignore[method-assign]
    with pytest.raises(Exception, match="does not have the type or shape of the bundle's policy and model"):
        case.session(native=True).run()


def test_a_graph_of_another_policy_or_kernel_is_refused() -> None:
    case = AttentionCase(BY_NAME["fp8"], HEADS, (70,))
    model = case.graph()
    model.graph.node[0].input.append("query")
    with pytest.raises(UserError, match="PagedAttention_0 is not the attention of the bundle's policy"):
        use_kernel(model, case.info, case.policy)
    model = case.graph()
    model.functions[0].node[0].domain = "kvgate.native"
    with pytest.raises(UserError, match=r"holds a node of the reserved domain kvgate\.native"):
        use_kernel(model, case.info, case.policy)


# ---- the compiler ----


def backend(attention: str) -> OnnxBackend:
    config = {"name": "onnxruntime", "compute_dtype": "float32", "threads": 1, "attention": attention}
    return OnnxBackend(OnnxRuntimeConfig.model_validate(config))


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "kvgate" / "native"


def pretend(monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...] | None) -> None:
    """Pretend that a command is the machine's compiler, or that there is no compiler."""
    monkeypatch.setattr(compiler, "find_compiler", lambda: Compiler(command, "pretended 1.0") if command else None)


def test_without_a_compiler_auto_selects_the_graph_and_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    with_kernel = backend("auto").run_parts()
    assert str(with_kernel["attention"]).startswith("native kernel ")
    assert backend("native").run_parts() == with_kernel
    assert backend("graph").run_parts() == {"threads": 1, "attention": "graph"}
    monkeypatch.setattr("stages.engines.onnx.backend.find_compiler", lambda: None)
    assert backend("auto").run_parts() == {"threads": 1, "attention": "graph"}
    pretend(monkeypatch, None)
    with pytest.raises(MissingRequirement, match=r"no C compiler here: install .* or set backend\.attention=graph"):
        backend("native").run_parts()


def test_a_failing_compiler_is_named_with_its_reason(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, ("sh", "-c", "echo 'operator.c:1: error: no such thing' >&2; exit 1"))
    with pytest.raises(MissingRequirement, match=r"pretended 1\.0 cannot compile the attention kernel: operator\.c:1: error"):
        compiled_kernel(64, 2)
    assert list(own_cache.iterdir()) == []


def test_a_library_that_cannot_be_loaded_is_named_with_a_fix(tmp_path: Path) -> None:
    (tmp_path / "kernel.so").write_text("on a file system without programs, as with the option noexec")
    with pytest.raises(MissingRequirement, match=r"kernel\.so cannot be loaded \(.+\): .* XDG_CACHE_HOME"):
        GraphSession(tmp_path / "model.onnx", 1, library=tmp_path / "kernel.so")


def test_a_library_is_compiled_once_for_its_heads_and_flags(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = own_cache.parent.parent / "log"
    stub = f'echo once >> {log}; for last; do out=$previous; previous=$last; done; : > "$out"'
    pretend(monkeypatch, ("sh", "-c", stub, "cc"))
    library = compiled_kernel(64, 2)
    assert compiled_kernel(64, 2) == library
    assert log.read_text() == "once\n"
    assert library.parent == own_cache
    assert own_cache.stat().st_mode & 0o777 == 0o700
    assert library.stat().st_mode & 0o222 == 0
    libraries = {library, compiled_kernel(64, 3), compiled_kernel(128, 2)}
    monkeypatch.setattr(compiler, "FLAGS", (*compiler.FLAGS, "-DOTHER"))
    assert len(libraries | {compiled_kernel(64, 2)}) == 4
    assert len(list(own_cache.iterdir())) == 4


def test_libraries_and_compilations_that_nobody_uses_are_removed(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, ("sh", "-c", 'for last; do out=$previous; previous=$last; done; : > "$out"', "cc"))
    unused, used = compiled_kernel(64, 2), compiled_kernel(64, 3)
    killed = own_cache / "compile-killed"
    killed.mkdir()
    (killed / "kernel.so").touch()
    for path in (unused, used, killed):
        os.utime(path, (0, 0))
    assert compiled_kernel(64, 3) == used
    compiled = compiled_kernel(64, 4)
    assert set(own_cache.iterdir()) == {used, compiled}


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("damaged", [b"the library", b"", b"THE library of a kernel"])
def test_a_library_that_was_damaged_is_compiled_again(damaged: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    content = b"the library of a kernel"
    stub = f'for last; do out=$previous; previous=$last; done; printf "{content.decode()}" > "$out"'
    pretend(monkeypatch, ("sh", "-c", stub, "cc"))
    library = compiled_kernel(64, 2)
    library.chmod(0o700)
    library.write_bytes(damaged)
    assert compiled_kernel(64, 2).read_bytes() == content


@pytest.mark.parametrize("mode", [0o755, 0o770, None])
def test_a_cache_that_other_users_can_change_is_refused(mode: int | None, own_cache: Path, tmp_path: Path) -> None:
    """A mode of None stands for a link that replaces the cache."""
    own_cache.parent.mkdir()
    if mode is None:
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        own_cache.symlink_to(tmp_path / "elsewhere")
    else:
        own_cache.mkdir()
        own_cache.chmod(mode)
    with pytest.raises(UserError, match="you must own it and its mode must be 0700; set XDG_CACHE_HOME"):
        compiled_kernel(64, 2)


def test_the_kernel_without_avx512_equals_the_graph(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile the other code path of the same sources, which AVX-512 processors can run too. No warning is allowed."""
    strict = ("-Wall", "-Wextra", "-Wno-unused-parameter", "-Werror")
    monkeypatch.setattr(compiler, "FLAGS", (*compiler.FLAGS, "-march=haswell", *strict))
    for name in ("bf16", "fp8_token", "e5m2_calibrated", "int8_asym", "int8_g16_int4_g16_asym", "int4_hadamard"):
        assert difference(AttentionCase(BY_NAME[name], HEADS, LENGTHS)) < ROUNDING
        assert difference(AttentionCase(BY_NAME[name], HEADS, (190,), tokens=CHUNK)) < CHUNK_ROUNDING
    assert len(list(own_cache.iterdir())) == 1
