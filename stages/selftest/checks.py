"""The checks of `python -m stages.selftest`: what only a machine with TensorRT and a GPU can tell of backend=tensorrt.

A check runs on a bench, which is this machine and engines that the pipeline builds on it. It returns a sentence on what it
measured, or raises CheckFailure. stages/selftest/__main__.py runs each check in a process of its own: a kernel that breaks CUDA
breaks only its own check.
"""

import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipeline.artifacts.store import Store
from pipeline.config.compose import plan
from pipeline.core.engine import Engine
from pipeline.core.errors import MissingRequirement
from pipeline.core.kv import KVPolicy, Side
from pipeline.core.redaction import child_environment
from pipeline.run.chain import Chain
from pipeline.run.inputs import check_inputs
from plugins.kv_attention.tensorrt_nodes import NAMESPACE, all_nodes
from stages.engines.oracle.config import TorchConfig
from stages.engines.oracle.engine import load_engine as load_oracle
from stages.engines.tensorrt.bundle import PLANS, PlanRecord, open_bundle
from stages.engines.tensorrt.engine import PlanEngine, load_engine
from stages.engines.tensorrt.library import load
from stages.engines.tensorrt.plugin import register
from stages.engines.tensorrt.surgery import PLUGIN_VERSION
from stages.evaluate.distances.distance import log_softmax

MAX_KL = 0.01
"""Largest KL in nats per token between the oracle (float32) and the plans (float16), which round activations."""

CORRUPTION_GAIN = 10.0
"""A corrupted key scale must raise the KL this many times, or the logits do not come from the cache."""

LEAK_BYTES = 4096
"""Bytes of device memory that a shape change may cost on average; the leak known from TensorRT 11.1 costs more."""

SHAPE_CHANGES = 400
"""Shape changes over which the average is taken."""

PLUGIN_FREE_PROGRAM = """
import sys
import tensorrt as trt
log = trt.Logger(trt.Logger.ERROR)
engine = trt.Runtime(log).deserialize_cuda_engine(open(sys.argv[1], "rb").read())
assert engine is not None, "the plan does not load"
assert not [name for name in sys.modules if name.startswith(("plugins", "triton"))]
"""
"""Loads a plan with TensorRT alone, without importing anything of this project."""


class CheckFailure(Exception):
    """The machine does not do what the engines rely on."""


class Bench:
    """This machine, and engines of a model and a policy.

    Args:
        model: model.path of the engines.
        policy: KV policy of the engines, an option of `kv`, and overrides of it.
        workdir: Where the engines are kept.

    Raises:
        MissingRequirement: There is no TensorRT, no GPU, or no CUDA build of torch.
        UserError: No engines can be built of the model or the policy.
    """

    def __init__(self, model: str, policy: Sequence[str], workdir: Path) -> None:
        self.library = load("tensorrt")
        kv = [f"kv={policy[0]}", *policy[1:]]
        overrides = [f"model.path={model}", *kv, f"workdir={workdir}", "backend=tensorrt", "stage=build"]
        config = plan([*overrides, "tracking=none"], multirun=False).jobs[0]
        check_inputs(config)
        self.policy: KVPolicy = config.kv
        self._chain = Chain(config, Store(config.work / "artifacts"))

    @cached_property
    def bundle(self) -> Path:
        """The bundle of the plans; built first where there is none."""
        return self._chain.bundle(self.policy).path

    @cached_property
    def record(self) -> PlanRecord:
        """What bundle.json says of the plans."""
        return open_bundle(self.bundle, "tensorrt")[0]

    def engine(self, *, cuda_graphs: bool) -> PlanEngine:
        """Load a new engine of the plans with the plugin."""
        return load_engine(self.bundle, library="tensorrt", cuda_graphs=cuda_graphs)

    def oracle(self) -> Engine:
        """Load the oracle of the same model and policy, on the CPU."""
        config = TorchConfig(name="torch", device="cpu", threads=1)
        return load_oracle(self._chain.bundle(self.policy, config).path, threads=1)

    def binding(self, name: str) -> tuple[str, str]:
        """Return the type and the memory layout of an input of the decode plan, as TensorRT names them."""
        runtime = self.library.trt.Runtime(self.library.log)
        engine = runtime.deserialize_cuda_engine((self.bundle / PLANS["decode"]).read_bytes())
        if engine is None:
            raise CheckFailure(f"the decode plan does not load: {'; '.join(self.library.take_errors())}")
        return engine.get_tensor_dtype(name).name, engine.get_tensor_format_desc(name)

    def registered(self) -> dict[str, bool]:
        """Load the plugin; return each of its operations, and whether TensorRT's registry has it now."""
        register()
        registry = self.library.trt.get_plugin_registry()
        return {node.plugin_id: registry.get_creator(node.name, PLUGIN_VERSION, NAMESPACE) is not None for node in all_nodes()}


def plugin_load(bench: Bench) -> str:
    """Check that TensorRT's registry has every operation once the plugin is loaded."""
    operations = bench.registered()
    missing = [name for name, registered in operations.items() if not registered]
    if missing:
        raise CheckFailure(f"{len(missing)} of {len(operations)} operations are not in TensorRT's registry, first {missing[0]}")
    return f"{len(operations)} operations registered"


def run_time_load(bench: Bench) -> str:
    """Check that the plan contains its kernels: it loads in a process that does not import the plugin."""
    if not bench.record.plugins:
        raise CheckFailure("the decode plan has no plugin node: the policy's layers kept their function bodies")
    command = [sys.executable, "-c", PLUGIN_FREE_PROGRAM, str(bench.bundle / PLANS["decode"])]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=child_environment())
    if result.returncode:
        reason = (result.stderr.strip().splitlines() or ["no reason"])[-1]
        raise CheckFailure(f"the plan does not load without the plugin: {reason}")
    return f"{len(bench.record.plugins)} plugin nodes, loaded without the plugin"


def launch(bench: Bench) -> str:
    """Check that both kernels run: logits are finite for an odd batch of sequences of unequal length."""
    engine = bench.engine(cuda_graphs=False)
    handles, _ = engine.prefill([_tokens(engine, size) for size in (5, 64, 129)])
    logits = engine.decode(handles, [1, 2, 3])
    if not np.isfinite(logits).all():
        raise CheckFailure(f"logits of {int((~np.isfinite(logits)).any(-1).sum())} of 3 sequences are not finite")
    return "decoded 3 sequences of 5, 64 and 129 tokens"


def fp8_bindings(bench: Bench) -> str:
    """Check that the pool of FP8 keys is bound as FP8 in linear layout."""
    dtype = bench.policy.sides(0)[Side.KEY].dtype
    if dtype != "fp8_e4m3":
        raise MissingRequirement(
            f"kv={bench.policy.name}: keys of layer 0 are {dtype}, not fp8_e4m3; choose another with --kv, fp8k_int4v for one"
        )
    kind, layout = bench.binding("key_pool.0")
    if kind != "FP8" or "linear" not in layout.lower():
        raise CheckFailure(f"key_pool.0 is bound as {kind}, {layout}")
    return f"key_pool.0 is {kind}, {layout}"


def append_in_place(bench: Bench) -> str:
    """Check that plans store their tokens in the pool: those of a prompt, and of launched, captured and replayed steps."""
    engine = bench.engine(cuda_graphs=True)
    (sequence, *_), _ = engine.prefill([_tokens(engine, 70)])
    for token in range(3):
        engine.decode([sequence], [token])
    for layer, copies in enumerate(engine.stored(sequence)):
        for side, copy in copies.items():
            lost = np.flatnonzero(~copy.codes.any((0, 2)))
            if lost.size:
                raise CheckFailure(
                    f"{side}s of layer {layer}: {lost.size} of 73 tokens are not in the pool, first token {lost[0]}"
                )
    return "73 tokens of a prompt and 3 steps are in the pool"


def logits_against_oracle(bench: Bench) -> str:
    """Check that forced decode through the plans gives the oracle's logits, and other ones with a corrupted key scale."""
    kl = _forced_kl(bench.engine(cuda_graphs=True), bench.oracle(), broken=False)
    if not kl <= MAX_KL:
        raise CheckFailure(f"mean KL to the oracle is {kl:.2e} nats a token, above {MAX_KL}")
    broken = _forced_kl(bench.engine(cuda_graphs=True), bench.oracle(), broken=True)
    if not broken >= CORRUPTION_GAIN * kl:
        raise CheckFailure(
            f"a broken key scale costs {broken:.2e} nats, no broken one {kl:.2e}: the logits are not the cache's"
        )
    return f"mean KL to the oracle {kl:.2e} nats a token; with a broken key scale {broken:.2e}"


def cuda_graph(bench: Bench) -> str:
    """Check that captured decode steps give, bit for bit, the logits of launched ones."""
    logits = []
    for captured in (False, True):
        engine = bench.engine(cuda_graphs=captured)
        handles, _ = engine.prefill([_tokens(engine, size) for size in (60, 7)])
        logits.append([engine.decode(handles, [step, step + 1]) for step in range(8)])
    shapes = engine.session("decode").replayed_shapes
    if not shapes:
        raise CheckFailure("no decode step was captured")
    if not all(np.array_equal(a, b) for a, b in zip(*logits, strict=True)):
        raise CheckFailure("replayed steps give other logits than launched ones")
    return f"{shapes} shapes captured, 8 steps equal"


def leak(bench: Bench) -> str:
    """Check that shape changes cost no device memory (NVIDIA/TensorRT issue 4849)."""
    engine = bench.engine(cuda_graphs=False)
    change = shape_changes(engine, bench.record, bench.policy)
    change(SHAPE_CHANGES // 4)  # The first ones allocate what is allocated only once.
    free_bytes = torch.cuda.mem_get_info()[0]
    change(SHAPE_CHANGES)
    bytes_per_change = (free_bytes - torch.cuda.mem_get_info()[0]) / SHAPE_CHANGES
    if bytes_per_change > LEAK_BYTES:
        raise CheckFailure(f"{bytes_per_change:,.0f} bytes of device memory are lost a shape change")
    return f"{max(0.0, bytes_per_change):,.0f} bytes a shape change over {SHAPE_CHANGES}"


def shape_changes(engine: PlanEngine, record: PlanRecord, policy: KVPolicy) -> Callable[[int], None]:
    """Return what gives one execution context of the decode plan so many other shapes, and runs it at each."""
    session, limits = engine.session("decode"), record.limits(policy)
    context: Any = session.context()
    most = {"B": limits.max_batch, "S": 1, "P": limits.sequence_pages, "Y": max(1, limits.sequence_window_pages)}
    for name, tensor in session.bound.items():
        session.check(context.set_input_shape(name, tuple(tensor.shape)), f"{name} of shape {tuple(tensor.shape)}")
    with session.device.running():  # The zeros are written before the first run, which is on that stream.
        tensors = session.bound | session.written
        described = session.inputs | session.outputs
        tensors |= {name: session.tensor(tensor, most) for name, tensor in described.items() if name not in tensors}

    def change(times: int) -> None:
        for name, tensor in tensors.items():  # which live as long as this function
            session.check(context.set_tensor_address(name, tensor.data_ptr()), f"the address of {name}")
        for turn in range(times):
            sizes = most | {"B": 1 + turn % limits.max_batch, "P": 1 + turn % limits.sequence_pages}
            for name, described in session.inputs.items():
                if name not in session.bound:
                    shape = tuple(sizes[d] if isinstance(d, str) else d for d in described.shape)
                    session.check(context.set_input_shape(name, shape), f"{name} of shape {shape}")
            session.check(context.execute_async_v3(session.device.stream), "a run")
            torch.cuda.synchronize()

    return change


def _tokens(engine: Engine, size: int) -> list[int]:
    """Return `size` random token ids, the same ones at every call."""
    return np.random.default_rng(size).integers(0, engine.vocab_size, size).tolist()  # type: ignore[no-any-return]


def _forced_kl(engine: Engine, oracle: Engine, *, broken: bool) -> float:
    """Return the mean KL of the engine's distributions from the oracle's over forced decode, in nats per token.

    `broken` corrupts the engine's key scale after the prefill.
    """
    text = _tokens(engine, 230)
    (sequences, _), (oracle_sequences, _) = engine.prefill([text[:200]]), oracle.prefill([text[:200]])
    if broken:
        engine.corrupt_key_scale(0.1)
    divergences = []
    for token in text[200:]:
        oracle_logp = log_softmax(oracle.decode(oracle_sequences, [token]))
        logp = log_softmax(engine.decode(sequences, [token]))
        divergences.append(float((np.exp(oracle_logp) * (oracle_logp - logp)).sum()))
    return float(np.mean(divergences))


CHECKS: dict[str, Callable[[Bench], str]] = {
    "plugin load": plugin_load,
    "run-time load": run_time_load,
    "launch": launch,
    "FP8 bindings": fp8_bindings,
    "append in place": append_in_place,
    "logits against the oracle": logits_against_oracle,
    "CUDA graph": cuda_graph,
    "leak over shape changes": leak,
}
