"""The checks of `python -m stages.selftest`: what CI cannot see of backend=tensorrt.

A check runs on a bench, which is a machine with TensorRT, a GPU and engines to compare. It returns a sentence on what it
measured, or raises CheckFailure. The bench is a protocol, so that the checks' judgement is tested without TensorRT or a GPU.
stages/selftest/__main__.py runs each check in a process of its own: a kernel that breaks CUDA breaks only its own check.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pipeline.core.engine import Engine
from pipeline.core.errors import MissingRequirement
from pipeline.core.kv import KVPolicy, Side
from stages.evaluate.distances.distance import log_softmax

MAX_KL = 0.01
"""Largest KL in nats per token between the oracle (float32) and the plans (float16), which round activations."""

CORRUPTION_GAIN = 10.0
"""A corrupted key scale must raise the KL this many times, or the logits do not come from the cache."""

LEAK_BYTES = 4096
"""Bytes of device memory that a shape change may cost on average; the leak known from TensorRT 11.1 costs more."""

SHAPE_CHANGES = 400
"""Shape changes over which the average is taken."""


class CheckFailure(Exception):
    """The machine does not do what the engines rely on."""


class Bench(Protocol):
    """What a check may use of the machine."""

    @property
    def policy(self) -> KVPolicy:
        """The KV policy of the engines."""
        ...

    def operations(self) -> Mapping[str, bool]:
        """Load the plugin; return each of its operations, and whether TensorRT's registry has it now."""
        ...

    def plugin_nodes(self) -> Sequence[str]:
        """Return the names of the plugin nodes in the decode plan."""
        ...

    def load_without_plugin(self) -> str:
        """Load the decode plan in a process that never imports the plugin; return a sentence on its inputs and outputs.

        Raises CheckFailure when it does not load.
        """
        ...

    def engine(self, *, cuda_graphs: bool) -> Engine:
        """Load a new engine of the plans with the plugin."""
        ...

    def oracle(self) -> Engine:
        """Load the oracle of the same model and policy, on the CPU."""
        ...

    def binding(self, name: str) -> tuple[str, str]:
        """Return the type and the memory layout of an input of the decode plan, as TensorRT names them."""
        ...

    def captured(self, engine: Engine) -> int:
        """Return how many decode shapes an engine replays as CUDA graphs."""
        ...

    def far_shared_memory(self, size: int) -> npt.NDArray[np.float32]:
        """Run a plugin that writes 1 .. 32 to the end of `size` bytes of shared memory; return the 32 values it reads back."""
        ...

    def append_in_place(self) -> tuple[dict[str, npt.NDArray[np.generic]], dict[str, npt.NDArray[np.generic]]]:
        """Append with the plugin, whose outputs are bound where its inputs lie, and with the reference.

        Returns:
            The cache's arrays by name, as the plugin wrote them and as the reference did.

        Raises:
            MissingRequirement: The plugin's kernels do not hold the policy.
        """
        ...

    def change_shape(self, times: int) -> None:
        """Give an execution context of the decode plan another shape and run it; do so `times` times."""
        ...

    def free_bytes(self) -> int:
        """Return the free device memory in bytes."""
        ...


def plugin_load(bench: Bench) -> str:
    """Check that TensorRT's registry has every operation once the plugin is loaded."""
    operations = bench.operations()
    missing = [name for name, registered in operations.items() if not registered]
    if missing:
        raise CheckFailure(f"{len(missing)} of {len(operations)} operations are not in TensorRT's registry, first {missing[0]}")
    return f"{len(operations)} operations registered"


def run_time_load(bench: Bench) -> str:
    """Check that the plan contains its kernels: it loads in a process that does not import the plugin."""
    nodes = bench.plugin_nodes()
    if not nodes:
        raise CheckFailure("the decode plan has no plugin node: the policy's layers kept their function bodies")
    return f"{len(nodes)} plugin nodes; loaded without the plugin: {bench.load_without_plugin()}"


def launch(bench: Bench) -> str:
    """Check that both kernels run: logits are finite for an odd batch of sequences of unequal length."""
    engine = bench.engine(cuda_graphs=False)
    handles, _ = engine.prefill([_tokens(engine, size) for size in (5, 64, 129)])
    logits = engine.decode(handles, [1, 2, 3])
    if not np.isfinite(logits).all():
        raise CheckFailure(f"logits of {int((~np.isfinite(logits)).any(-1).sum())} of 3 sequences are not finite")
    return "decoded 3 sequences of 5, 64 and 129 tokens"


def shared_memory(bench: Bench) -> str:
    """Check that the launch of a plugin gets more shared memory than the 48 KB that need no opt-in."""
    size = 64 * 1024
    expected = np.arange(1, 33, dtype=np.float32)
    values = bench.far_shared_memory(size)
    if not np.array_equal(values, expected):
        raise CheckFailure(
            f"a launch with {size} bytes of shared memory read back {values[:4].tolist()}, wrote {expected[:4].tolist()}"
        )
    return f"{size} bytes of dynamic shared memory"


def fp8_bindings(bench: Bench) -> str:
    """Check that the pool of FP8 keys is bound as FP8 in linear layout, and read: other scales must give other logits."""
    dtype = bench.policy.sides(0)[Side.KEY].dtype
    if dtype != "fp8_e4m3":
        raise MissingRequirement(
            f"kv={bench.policy.name}: keys of layer 0 are {dtype}, not fp8_e4m3; choose another with --kv, fp8k_int4v for one"
        )
    kind, layout = bench.binding("key_pool.0")
    if kind != "FP8" or "linear" not in layout.lower():
        raise CheckFailure(f"key_pool.0 is bound as {kind}, {layout}")
    engine = bench.engine(cuda_graphs=False)
    handles, _ = engine.prefill([_tokens(engine, 130)])
    repeated, _ = engine.prefill([_tokens(engine, 130)])
    logits = engine.decode(handles, [1])
    engine.corrupt_key_scale(0.1)
    corrupted_logits = engine.decode(repeated, [1])
    if np.array_equal(logits, corrupted_logits):
        raise CheckFailure("logits did not change with the scale of the FP8 keys: the pool is not read where it is bound")
    return f"key_pool.0 is {kind}, {layout}"


def append_in_place(bench: Bench) -> str:
    """Check that the append plugin writes in place, bit for bit what the reference writes, and that plans store so."""
    written, expected = bench.append_in_place()
    for name, values in expected.items():
        wrong = int((written[name].view(np.uint8) != values.view(np.uint8)).sum())
        if wrong:
            raise CheckFailure(
                f"{wrong} of {values.nbytes} bytes of {name} are not what the reference writes: plans do not store their tokens"
            )
    engine = bench.engine(cuda_graphs=True)
    (sequence, *_), _ = engine.prefill([_tokens(engine, 70)])
    for token in range(3):  # launched, captured and replayed
        engine.decode([sequence], [token])
    for layer, copies in enumerate(engine.stored(sequence)):
        for side, copy in copies.items():
            lost = np.flatnonzero(~copy.codes.any((0, 2)))
            if lost.size:
                raise CheckFailure(
                    f"{side}s of layer {layer}: {lost.size} of 73 tokens are not in the pool, first token {lost[0]}"
                )
    return f"{', '.join(expected)} written in place; 73 tokens of a prompt and 3 steps are in the pool"


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
    if not bench.captured(engine):
        raise CheckFailure("no decode step was captured")
    if not all(np.array_equal(a, b) for a, b in zip(*logits, strict=True)):
        raise CheckFailure("replayed steps give other logits than launched ones")
    return f"{bench.captured(engine)} shapes captured, 8 steps equal"


def leak(bench: Bench) -> str:
    """Check that shape changes cost no device memory (NVIDIA/TensorRT issue 4849)."""
    bench.change_shape(SHAPE_CHANGES // 4)  # The first ones allocate what is allocated only once.
    free_bytes = bench.free_bytes()
    bench.change_shape(SHAPE_CHANGES)
    bytes_per_change = (free_bytes - bench.free_bytes()) / SHAPE_CHANGES
    if bytes_per_change > LEAK_BYTES:
        raise CheckFailure(f"{bytes_per_change:,.0f} bytes of device memory are lost a shape change")
    return f"{max(0.0, bytes_per_change):,.0f} bytes a shape change over {SHAPE_CHANGES}"


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
    "shared memory above 48 KB": shared_memory,
    "FP8 bindings": fp8_bindings,
    "append in place": append_in_place,
    "logits against the oracle": logits_against_oracle,
    "CUDA graph": cuda_graph,
    "leak over shape changes": leak,
}


def judge(name: str, bench: Callable[[], Bench]) -> tuple[str, str]:
    """Run one check.

    Args:
        name: A key of CHECKS.
        bench: Opens the bench.

    Returns:
        PASS, FAIL or CANNOT RUN, and the reason. The caller judges any other exception a FAIL.
    """
    try:
        return "PASS", CHECKS[name](bench())
    except CheckFailure as error:
        return "FAIL", str(error)
    except MissingRequirement as error:
        return "CANNOT RUN", str(error)
