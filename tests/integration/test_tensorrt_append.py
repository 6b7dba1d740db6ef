"""Plans that store their own tokens: whole graphs with interpreted appends against the ONNX engine, its graphs and its pool."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from amount import STRIDE
from onnx_fixtures import BY_NAME, INT4, fmt, int4_groups, shared_decoder
from plugin_graphs import PluginGraph, is_plugin
from plugin_plans import Plans
from transfers import counted_transfers

from pipeline.core.errors import UserError
from pipeline.core.kv import KVPolicy, KVShape, LayerOverride, Side
from stages.engines.paged.kernel_layout import choose_layers
from stages.engines.tensorrt.append import append_groups
from stages.engines.tensorrt.engine import PlanEngine
from stages.engines.tensorrt.shapes import Limits

AGED = KVPolicy(
    name="aged", key=fmt("fp8_e4m3", "per_head"), value=int4_groups(32), sink_tokens=4, recent_tokens=60,
    overrides=(LayerOverride(layers=(1,), key=INT4),),
)  # fmt: skip
"""Sinks and recent tokens; keys of the second layer in a format that the kernels do not hold."""

TWO_GROUPS = KVPolicy(
    name="two_groups", key=fmt("fp8_e4m3", "per_token"), value=int4_groups(32), sink_tokens=70, recent_tokens=9,
    overrides=(LayerOverride(layers=(1,), key=fmt("int8", "per_head"), value=fmt("int8", "per_token")),),
)  # fmt: skip
"""Both layers are held, in two layouts: each has an append. Sinks reach into the second page."""

POLICIES = {policy.name: policy for policy in (
    *(BY_NAME[name] for name in ("fp16", "fp8", "int8", "fp8k_int4v", "fp8k_nvfp4v")), AGED, TWO_GROUPS,
)}  # fmt: skip
NAMES = list(POLICIES) if STRIDE == 1 else ["fp8k_int4v", "aged", "two_groups"]
"""Those that are tested: in `make test-long` all of them."""


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Plans]:
    decoder = shared_decoder(tmp_path_factory, "float32")
    return {name: Plans(tmp_path_factory.mktemp(name), decoder, policy) for name, policy in POLICIES.items() if name in NAMES}


def held(engine: Any, handles: list[int]) -> dict[str, list[np.ndarray]]:
    """The bytes of every token that sequences hold, and of their exact buffers."""
    pool = engine.pool
    found: dict[str, list[np.ndarray]] = {}
    for name, array in pool.arrays.items():
        bytes_of = [np.asarray(row.cpu() if isinstance(row, torch.Tensor) else row) for row in array]
        found[name] = []
        for handle in handles:
            row = pool.sequences[handle]
            if name.startswith(("key_exact", "value_exact")):
                sinks, recent = pool.policy.sink_tokens, pool.policy.recent_tokens
                slots = [at if at < sinks else sinks + at % recent for at in range(row.length)
                         if at < sinks or at >= row.length - recent]  # fmt: skip
                found[name].append(bytes_of[row.buffer][:, slots])
            else:
                tokens = np.concatenate([bytes_of[page] for page in row.pages], 1)
                found[name].append(tokens[:, : row.length])
    return found


def same(got: dict[str, list[np.ndarray]], expected: dict[str, list[np.ndarray]]) -> None:
    assert got.keys() == expected.keys()
    for name, rows in expected.items():
        for mine, other in zip(got[name], rows, strict=True):
            assert np.ascontiguousarray(mine).tobytes() == np.ascontiguousarray(other).tobytes(), name


@pytest.mark.parametrize("name", NAMES)
def test_steps_and_chunks_store_what_the_embedded_engine_stores_bit_for_bit(name: str, plans: Mapping[str, Plans]) -> None:
    """Chunks that begin within pages, sinks and a ring that chunks and steps run through, rows and columns of padding."""
    rng = np.random.default_rng(0)
    (engine, _), expected = plans[name].engine(), plans[name].onnx()
    engine.prefill_chunk = expected.prefill_chunk = 100
    prompts = [rng.integers(0, 256, size).tolist() for size in (3, 130, 63)]
    (handles, logits), (others, wanted) = engine.prefill(prompts), expected.prefill(prompts)
    np.testing.assert_allclose(logits, wanted, atol=2e-4)
    same(held(engine, handles), held(expected, others))
    for step in range(12):
        live = slice(0, 3 if step < 8 else 2)
        tokens = rng.integers(0, 256, len(handles[live])).tolist()
        np.testing.assert_allclose(engine.decode(handles[live], tokens), expected.decode(others[live], tokens), atol=2e-4)
    same(held(engine, handles), held(expected, others))


@pytest.mark.parametrize("name", ["fp8k_int4v", "two_groups"])
def test_the_interpreted_kernel_stores_the_same(name: str, plans: Mapping[str, Plans]) -> None:
    (engine, _), expected = plans[name].engine(interpreted=True), plans[name].onnx()
    (handles, _), (others, _) = engine.prefill([[1, 2, 3]]), expected.prefill([[1, 2, 3]])
    for token in (4, 5):
        engine.decode(handles, [token])
        expected.decode(others, [token])
    same(held(engine, handles), held(expected, others))


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("fp8", "fp8k_nvfp4v")])
def test_corrupted_scales_are_those_of_the_embedded_engine(name: str, plans: Mapping[str, Plans]) -> None:
    """Of stored and of later tokens, in steps that are launched, captured and replayed."""
    (engine, _), expected = plans[name].engine(), plans[name].onnx()
    prompts = [[3] * 70, [2] * 5, [9] * 20]
    (handles, _), (others, _) = engine.prefill(prompts), expected.prefill(prompts)
    for turn in range(6):
        for one in (engine, expected):
            if turn == 1:
                one.corrupt_scale(Side.KEY, 0.5)
            if turn == 3:
                one.corrupt_scale(Side.VALUE, 1.5, 1, 0)
        got, wanted = engine.decode(handles, [turn, 7, 8]), expected.decode(others, [turn, 7, 8])
        np.testing.assert_allclose(got, wanted, atol=2e-4)
    engine.prefill([[5] * 9])
    expected.prefill([[5] * 9])
    same(held(engine, handles), held(expected, others))


def memory(engine: PlanEngine) -> list[np.ndarray]:
    """All bytes of the pool, in use or not."""
    return [stack.tensor.contiguous().view(torch.uint8).numpy().copy() for stack in engine._torch_pool.stacks]


@pytest.mark.parametrize("name", ["fp8k_int4v", "aged"])
@pytest.mark.parametrize("broken", [np.nan, np.inf, 1e6])
def test_a_step_with_a_key_or_value_that_is_not_finite_stores_nothing(
    broken: float, name: str, plans: Mapping[str, Plans]
) -> None:
    """1e6 is a number, but none of float16."""
    (engine, graphs), expected = plans[name].engine(), plans[name].onnx()
    prompts = [[3] * 64, [2] * 65, [9] * 20]
    (handles, _), (others, _) = engine.prefill(prompts), expected.prefill(prompts)
    before = memory(engine)
    key, value = (attention(graphs["decode"].plain, 0).input[place] for place in (1, 2))
    graphs["decode"].spoilt = (value, (1, 1, 0, 5), broken)
    with pytest.raises(UserError, match=rf"value of layer 0, token 65 of sequence {handles[1]} is not finite"):
        engine.decode(handles, [7, 8, 9])
    graphs["decode"].spoilt = (key, (3, 0, 0, 0), broken)  # a row of padding
    np.testing.assert_allclose(engine.decode(handles, [4, 5, 6]), expected.decode(others, [4, 5, 6]), atol=2e-4)
    graphs["decode"].spoilt = None
    after = memory(engine)
    assert not all(np.array_equal(*pair) for pair in zip(before, after, strict=True))

    graphs["prefill"].spoilt = (attention(graphs["prefill"].plain, 0).input[1], (0, 1, 2, 3), broken)
    with pytest.raises(UserError, match="key of layer 0, token 2 of sequence"):
        engine.prefill([[1] * 5])
    assert all(np.array_equal(*pair) for pair in zip(after, memory(engine), strict=True))
    graphs["prefill"].spoilt = (attention(graphs["prefill"].plain, 0).input[1], (0, 1, 6, 3), broken)  # a column of padding
    (handles, _), (others, _) = engine.prefill([[1] * 5]), expected.prefill([[1] * 5])
    same(held(engine, handles), held(expected, others))


def attention(model: onnx.ModelProto, layer: int) -> onnx.NodeProto:
    node: onnx.NodeProto
    (node,) = (node for node in model.graph.node if node.op_type == f"PagedAttention_{layer}")
    return node


@pytest.mark.parametrize("name", ["fp8k_int4v", "two_groups"])
def test_nothing_but_the_places_of_real_tokens_is_written(name: str, plans: Mapping[str, Plans]) -> None:
    engine, _ = plans[name].engine()
    pool = engine._torch_pool
    for stack in pool.stacks:
        stack.tensor.contiguous().view(torch.uint8).fill_(0x5A)
    before = {key: tensor.contiguous().view(torch.uint8).numpy().copy() for key, tensor in pool.tensors.items()}
    handles, _ = engine.prefill([[1] * 70, [2] * 3, [3] * 66])
    for step in range(3):
        engine.decode(handles, [step] * 3)
    rows = [pool.sequences[handle] for handle in handles]
    paged = {(row.pages[at // 64], at % 64) for row in rows for at in range(row.length)}
    sinks, recent = pool.policy.sink_tokens, pool.policy.recent_tokens
    exact = {(row.buffer, at) for row in rows for at in range(min(sinks, row.length))}
    exact |= {(row.buffer, sinks + at % recent) for row in rows if recent for at in range(row.length)}
    for key, tensor in pool.tensors.items():
        changed = (tensor.contiguous().view(torch.uint8).numpy() != before[key]).any((1, 3))
        places = set(map(tuple, np.argwhere(changed).tolist()))
        expected = exact if key.startswith(("key_exact", "value_exact")) else paged
        assert places <= expected, key
        assert len(places) >= len(expected) - (recent if expected is exact else len(expected) // 2), key


@pytest.mark.parametrize("name", ["fp8k_int4v", "aged", "two_groups"])
def test_a_graph_keeps_nothing_of_what_the_append_does(name: str, plans: Mapping[str, Plans]) -> None:
    """No quantization, outputs, functions or constants of layers that it stores, and no node that nothing reads."""
    one = plans[name]
    layers = {layer for group in append_groups(choose_layers(one.policy, one.info.shape, one.info.q_heads), one.limits)
              for layer in group.layers}  # fmt: skip
    for model in one.graphs.values():
        graph = model.graph
        outputs, taken = {value.name for value in graph.output}, {name for node in graph.node for name in node.input}
        assert {int(name.rpartition(".")[2]) for name in outputs if name.startswith("new_")} == {0, 1} - layers
        assert all(set(node.output) & (taken | outputs) for node in graph.node)
        assert {tensor.name for tensor in graph.initializer} <= taken
        assert {(f.domain, f.name) for f in model.functions} <= {(node.domain, node.op_type) for node in graph.node}
        kept = {f.name for f in model.functions if f.name.startswith("Quantize")}
        assert kept == {f"Quantize{side}_{layer}" for side in ("Key", "Value") for layer in {0, 1} - layers}


@pytest.mark.parametrize("name", NAMES)
def test_every_append_takes_a_result_of_every_attention_that_reads_what_it_overwrites(
    name: str, plans: Mapping[str, Plans]
) -> None:
    for mode, model in plans[name].graphs.items():
        makers = {made: node for node in model.graph.node for made in node.output}

        def behind(node: onnx.NodeProto, makers: dict[str, onnx.NodeProto] = makers) -> set[str]:
            """The plugin nodes that a node's inputs come from, and no others."""
            found: set[str] = set()
            todo = list(node.input)
            seen: set[str] = set()
            while todo:
                made = todo.pop()
                if made in makers and made not in seen:
                    seen.add(made)
                    found |= {makers[made].name} if is_plugin(makers[made]) else set()
                    todo += makers[made].input
            return found

        readers = {node.name for node in model.graph.node if is_plugin(node) and "_partial" in node.op_type}
        appends = [node for node in model.graph.node if is_plugin(node) and node.name.startswith("append")]
        assert appends
        for append in appends:
            assert behind(append) >= readers, mode
            # not by way of what TensorRT could see through: the last attention's own result is an input
            (attended,) = (made for made in append.input if made in makers and "_reduce" in makers[made].op_type)
            last = max(int(reader.partition(".")[2]) for reader in readers)
            assert makers[attended].name.endswith(f"_reduce.{last}")


@pytest.mark.parametrize("name", ["fp8k_int4v", "aged", "two_groups"])
def test_a_layer_and_its_stack_are_the_same_memory_where_tensorrt_takes_it(name: str, plans: Mapping[str, Plans]) -> None:
    engine, _ = plans[name].engine()
    pool = engine._torch_pool
    assert pool.pages.capacity % 2 == pool.buffers.capacity % 2 == 1
    for stack in pool.stacks:
        for name_of_layer in stack.names:
            tensor = pool.tensors[name_of_layer]
            assert (tensor.data_ptr() - stack.tensor.data_ptr()) % 256 == 0  # a GPU's memory begins there
            assert tensor.is_contiguous()
    for binding, tensor in pool.bindings.items():
        assert tensor.is_contiguous()
        assert binding.startswith("appended_") or pool.bindings[f"appended_{binding}"] is tensor
        array, _, group = binding.removeprefix("appended_").partition(".group")
        (members,) = (g.layers for g in append_groups(choose_layers(
            pool.policy, pool.shape, plans[name].info.q_heads), pool.limits) if g.number == int(group))  # fmt: skip
        assert [layer.data_ptr() for layer in tensor] == [pool.tensors[f"{array}.{n}"].data_ptr() for n in members]


def test_a_stack_that_tensorrt_could_not_address_is_several(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, shape = BY_NAME["fp8"], KVShape(layers=7, kv_heads=8, head_dim=128)
    limits, layers = Limits(policy, 16, 32_768), choose_layers(policy, shape, 32)  # 2^29 codes a layer
    assert [group.layers for group in append_groups(layers, limits)] == [[0, 1, 2], [3, 4, 5], [6]]
    monkeypatch.setattr("stages.engines.tensorrt.append.MOST_ELEMENTS", 1)
    assert [group.layers for group in append_groups(layers, limits)] == [[n] for n in range(7)]


@pytest.mark.parametrize("name", ["fp8k_int4v", "aged"])
def test_a_step_is_still_one_upload_and_one_read(
    name: str, plans: Mapping[str, Plans], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, _ = plans[name].engine()
    handles, _ = engine.prefill([[1] * 3, [2] * 63])
    for turn in range(4):
        if turn == 3:
            engine.corrupt_scale(Side.VALUE, 2.0)
        engine.decode(handles, [1, 2])
        with monkeypatch.context() as patch, counted_transfers(patch) as counts:
            patch.setattr(PluginGraph, "run", outside(PluginGraph.run))
            engine.decode(handles, [1, 2])
        assert counts == {"uploads": 1, "reads": 1, "transfers": []}


def outside(run: Callable[..., None]) -> Callable[..., None]:
    """What stands for TensorRT moves numbers as it likes."""

    def uncounted(*args: Any) -> None:
        with torch._C.DisableTorchFunction():
            run(*args)

    return uncounted


def test_a_float16_plan_stores_what_the_graphs_of_its_type_store(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The kernel divides in float32, graphs of float16 in float16: few codes are another's neighbours."""
    root, decoder = tmp_path_factory.mktemp("float16"), shared_decoder(tmp_path_factory, "float16")
    one = Plans(root, decoder, BY_NAME["fp8k_int4v"])
    (engine, _), expected = one.engine(), one.onnx()
    (handles, _), (others, _) = engine.prefill([[3] * 70, [2] * 5]), expected.prefill([[3] * 70, [2] * 5])
    for token in range(4):
        got, wanted = engine.decode(handles, [token, 9]), expected.decode(others, [token, 9])
        np.testing.assert_allclose(got, wanted, atol=0.05)
    got_bytes, wanted_bytes = held(engine, handles), held(expected, others)
    for name in (name for name in wanted_bytes if name.endswith(".0")):  # later layers' keys are rounded differently before
        equal = [(mine == other).mean() for mine, other in zip(got_bytes[name], wanted_bytes[name], strict=True)]
        assert min(equal) > 0.98, name


@pytest.mark.parametrize("name", NAMES)
def test_prompts_that_prefill_together_store_what_they_store_one_by_one(name: str, plans: Mapping[str, Plans]) -> None:
    """Rows of unequal lengths in one run, each in chunks of its own; in a run of three rows, one of padding."""
    (engine, graphs), expected = plans[name].engine(), plans[name].onnx()
    engine.prefill_chunk = expected.prefill_chunk = 100
    rng = np.random.default_rng(5)
    prompts = [rng.integers(0, 256, size).tolist() for size in (170, 90, 265)]
    shapes = []
    run = graphs["prefill"].run

    def watched(inputs: Any, outputs: Any) -> None:
        shapes.append(inputs["input_ids"].shape)
        run(inputs, outputs)

    graphs["prefill"].run = watched  # type: ignore[method-assign]
    (handles, logits), (others, wanted) = engine.prefill(prompts), expected.prefill(prompts)
    assert shapes == [(4, 128), (2, 128), (1, 128)]
    np.testing.assert_allclose(logits, wanted, atol=2e-4)
    same(held(engine, handles), held(expected, others))
    np.testing.assert_allclose(engine.decode(handles, [1, 2, 3]), expected.decode(others, [1, 2, 3]), atol=2e-4)
    same(held(engine, handles), held(expected, others))


def test_a_prompt_that_is_not_finite_refuses_those_that_prefill_with_it(plans: Mapping[str, Plans]) -> None:
    engine, graphs = plans["two_groups"].engine()
    before, in_use = memory(engine), engine.pool.in_use
    graphs["prefill"].spoilt = (attention(graphs["prefill"].plain, 0).input[1], (1, 1, 6, 3), np.nan)
    with pytest.raises(UserError, match="key of layer 0, token 6 of sequence"):
        engine.prefill([[1] * 5, [2] * 7])
    assert all(np.array_equal(*pair) for pair in zip(before, memory(engine), strict=True))
    assert engine.pool.in_use == in_use
    graphs["prefill"].spoilt = (attention(graphs["prefill"].plain, 0).input[1], (0, 1, 6, 3), np.nan)  # padding
    expected = plans["two_groups"].onnx()
    (handles, _), (others, _) = engine.prefill([[1] * 5, [2] * 7]), expected.prefill([[1] * 5, [2] * 7])
    same(held(engine, handles), held(expected, others))
