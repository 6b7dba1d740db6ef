"""What CI cannot see of backend=tensorrt, each a check on a bench: a machine with TensorRT, a GPU and engines to compare.

A check returns what it found, or raises Failed. The bench is a protocol, so that the checks' own judgement is tested without
either. stages/selftest/__main__.py runs each in a process of its own: a kernel that breaks CUDA breaks only its own check.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pipeline.core.errors import MissingRequirement
from pipeline.core.kv import KVPolicy, Side
from pipeline.core.records import Engine

Logits = npt.NDArray[np.float32]

MAX_KL = 0.01
"""Nats a token between the oracle (float32) and the plans (float16): what rounding activations may cost."""

BROKEN_GAIN = 10.0
"""A key scale that is wrong by as much must cost this many times more, or the logits do not come from the cache."""

LEAK_BYTES = 4096
"""Device memory that a shape change may cost on average; the leak known from TensorRT 11.1 costs more."""

SHAPE_CHANGES = 400


class Failed(Exception):
    """The machine does not do what the engines rely on."""


class Bench(Protocol):
    """What a check may ask of the machine."""

    @property
    def policy(self) -> KVPolicy:
        """Of the engines."""
        ...

    def operations(self) -> Mapping[str, bool]:
        """Every operation of the plugin, and whether TensorRT's registry has it after the plugin was loaded."""
        ...

    def plugin_nodes(self) -> Sequence[str]:
        """Plugin nodes in the decode plan."""
        ...

    def load_elsewhere(self) -> str:
        """What a process that never imports the plugin says of the decode plan's inputs and outputs; Failed if it cannot."""
        ...

    def engine(self, *, cuda_graphs: bool) -> Engine:
        """A freshly loaded engine of the plans with the plugin."""
        ...

    def oracle(self) -> Engine: ...

    def binding(self, name: str) -> tuple[str, str]:
        """Type and memory layout of an input of the decode plan, in TensorRT's words."""
        ...

    def captured(self, engine: Engine) -> int:
        """Decode shapes that an engine replays as CUDA graphs."""
        ...

    def far_shared_memory(self, size: int) -> npt.NDArray[np.float32]:
        """What a plugin whose kernel writes 1 .. 32 to the end of `size` bytes of shared memory reads back."""
        ...

    def append_in_place(self) -> tuple[dict[str, npt.NDArray[np.generic]], dict[str, npt.NDArray[np.generic]]]:
        """The cache's arrays after the append plugin wrote into aliased inputs, and as the reference writes them.

        Raises MissingRequirement for a policy that the plugin does not hold.
        """
        ...

    def change_shape(self, times: int) -> None:
        """Give an execution context of the decode plan another shape and run it, `times` times."""
        ...

    def free_bytes(self) -> int:
        """Free device memory."""
        ...


def plugin_load(bench: Bench) -> str:
    """TensorRT's registry knows every operation after the import."""
    found = bench.operations()
    missing = [name for name, there in found.items() if not there]
    if missing:
        raise Failed(f"{len(missing)} of {len(found)} operations are not in TensorRT's registry, first {missing[0]}")
    return f"{len(found)} operations registered"


def run_time_load(bench: Bench) -> str:
    """The plan holds its kernels: it loads where nobody imported the plugin."""
    nodes = bench.plugin_nodes()
    if not nodes:
        raise Failed("the decode plan has no plugin node: the policy's layers kept their function bodies")
    return f"{len(nodes)} plugin nodes; loaded without the plugin: {bench.load_elsewhere()}"


def launch(bench: Bench) -> str:
    """Both kernels run: decoded logits are finite, also for sequences of unequal length and an odd batch."""
    engine = bench.engine(cuda_graphs=False)
    handles, _ = engine.prefill([_tokens(engine, size) for size in (5, 64, 129)])
    logits = engine.decode(handles, [1, 2, 3])
    if not np.isfinite(logits).all():
        raise Failed(f"logits of {int((~np.isfinite(logits)).any(-1).sum())} of 3 sequences are not finite")
    return "decoded 3 sequences of 5, 64 and 129 tokens"


def shared_memory(bench: Bench) -> str:
    """A plugin's launch gets more than the 48 KB that need no opt-in."""
    size = 64 * 1024
    expected = np.arange(1, 33, dtype=np.float32)
    found = bench.far_shared_memory(size)
    if not np.array_equal(found, expected):
        raise Failed(
            f"a launch with {size} bytes of shared memory read back {found[:4].tolist()}, wrote {expected[:4].tolist()}"
        )
    return f"{size} bytes of dynamic shared memory"


def fp8_bindings(bench: Bench) -> str:
    """The pool of FP8 keys is bound as such, in linear layout, and read: other scales give other logits."""
    dtype = bench.policy.sides(0)[Side.KEY].dtype
    if dtype != "fp8_e4m3":
        raise MissingRequirement(
            f"kv={bench.policy.name}: keys of layer 0 are {dtype}, not fp8_e4m3; choose another with --kv, fp8k_int4v for one"
        )
    kind, layout = bench.binding("key_pool.0")
    if kind != "FP8" or "linear" not in layout.lower():
        raise Failed(f"key_pool.0 is bound as {kind}, {layout}")
    engine = bench.engine(cuda_graphs=False)
    handles, _ = engine.prefill([_tokens(engine, 130)])
    twin, _ = engine.prefill([_tokens(engine, 130)])
    before = engine.decode(handles, [1])
    engine.corrupt_key_scale(0.1)
    after = engine.decode(twin, [1])
    if np.array_equal(before, after):
        raise Failed("logits did not change with the scale of the FP8 keys: the pool is not read where it is bound")
    return f"key_pool.0 is {kind}, {layout}"


def aliased_append(bench: Bench) -> str:
    """The append plugin writes in place, bit for bit what the reference writes. The engines do not rely on it."""
    found, expected = bench.append_in_place()
    for name, values in expected.items():
        wrong = int((found[name].view(np.uint8) != values.view(np.uint8)).sum())
        if wrong:
            raise Failed(
                f"{wrong} of {values.nbytes} bytes of {name} are not what the reference writes; engines append outside"
            )
    return f"{', '.join(expected)} written in place"


def logits_against_oracle(bench: Bench) -> str:
    """Forced decode through the plans is the oracle's, and would not be with a broken scale."""
    kl = _forced_kl(bench.engine(cuda_graphs=True), bench.oracle(), broken=False)
    if not kl <= MAX_KL:
        raise Failed(f"mean KL to the oracle is {kl:.2e} nats a token, above {MAX_KL}")
    broken = _forced_kl(bench.engine(cuda_graphs=True), bench.oracle(), broken=True)
    if not broken >= BROKEN_GAIN * kl:
        raise Failed(f"a broken key scale costs {broken:.2e} nats, no broken one {kl:.2e}: the logits are not the cache's")
    return f"mean KL to the oracle {kl:.2e} nats a token; with a broken key scale {broken:.2e}"


def cuda_graph(bench: Bench) -> str:
    """Captured steps give bit for bit what launched ones give."""
    logits = []
    for captured in (False, True):
        engine = bench.engine(cuda_graphs=captured)
        handles, _ = engine.prefill([_tokens(engine, size) for size in (60, 7)])
        logits.append([engine.decode(handles, [step, step + 1]) for step in range(8)])
    if not bench.captured(engine):
        raise Failed("no decode step was captured")
    if not all(np.array_equal(a, b) for a, b in zip(*logits, strict=True)):
        raise Failed("replayed steps give other logits than launched ones")
    return f"{bench.captured(engine)} shapes captured, 8 steps equal"


def leak(bench: Bench) -> str:
    """Shape changes cost no device memory (NVIDIA/TensorRT issue 4849)."""
    bench.change_shape(SHAPE_CHANGES // 4)  # what is allocated once
    before = bench.free_bytes()
    bench.change_shape(SHAPE_CHANGES)
    each = (before - bench.free_bytes()) / SHAPE_CHANGES
    if each > LEAK_BYTES:
        raise Failed(f"{each:,.0f} bytes of device memory are lost a shape change")
    return f"{max(0.0, each):,.0f} bytes a shape change over {SHAPE_CHANGES}"


def _tokens(engine: Engine, size: int) -> list[int]:
    """Always the same ones."""
    return np.random.default_rng(size).integers(0, engine.vocab_size, size).tolist()  # type: ignore[no-any-return]


def _forced_kl(engine: Engine, oracle: Engine, *, broken: bool) -> float:
    """Mean KL from the oracle's distributions to the engine's over forced decode, in nats a token."""
    text = _tokens(engine, 230)
    (ours, _), (truth, _) = engine.prefill([text[:200]]), oracle.prefill([text[:200]])
    if broken:
        engine.corrupt_key_scale(0.1)
    found = []
    for token in text[200:]:
        p, q = (_log_softmax(one.decode(handles, [token])[0]) for one, handles in ((oracle, truth), (engine, ours)))
        found.append(float((np.exp(p) * (p - q)).sum()))
    return float(np.mean(found))


def _log_softmax(logits: Logits) -> npt.NDArray[np.float64]:
    shifted = logits.astype(np.float64) - float(logits.max())
    out: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return out


CHECKS: dict[str, Callable[[Bench], str]] = {
    "plugin load": plugin_load,
    "run-time load": run_time_load,
    "launch": launch,
    "shared memory above 48 KB": shared_memory,
    "FP8 bindings": fp8_bindings,
    "aliased append": aliased_append,
    "logits against the oracle": logits_against_oracle,
    "CUDA graph": cuda_graph,
    "leak over shape changes": leak,
}


def judge(name: str, bench: Callable[[], Bench]) -> tuple[str, str]:
    """PASS, FAIL or CANNOT RUN of one check, and the reason. Anything that breaks on the way is the finding: a FAIL."""
    try:
        return "PASS", CHECKS[name](bench())
    except Failed as error:
        return "FAIL", str(error)
    except MissingRequirement as error:
        return "CANNOT RUN", str(error)
