"""The self-test's checks on a bench without a GPU: what each of them passes, and what it fails."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pipeline.core.errors import MissingRequirement
from pipeline.core.formats import Format
from pipeline.core.kv import KVPolicy, Side
from pipeline.core.records import StoredCopy
from stages.selftest import checks
from stages.selftest.checks import CHECKS, CheckFailure, judge


class Bench:
    """A machine on which everything works, but for its `faults`."""

    def __init__(self, **faults: Any) -> None:
        self.faults = faults
        self.free = 1 << 30
        self.changes = 0

    @property
    def policy(self) -> KVPolicy:
        key = Format(dtype=self.faults.get("keys", "fp8_e4m3"), granularity="per_token", scale="dynamic")
        return KVPolicy(name="some", key=key, value=key)

    def operations(self) -> Mapping[str, bool]:
        return {"kv::decode_partial": True, "kv::decode_reduce": "operations" not in self.faults}

    def plugin_nodes(self) -> Sequence[str]:
        nodes: Sequence[str] = self.faults.get("nodes", ["decode_partial.0", "decode_reduce.0"])
        return nodes

    def load_without_plugin(self) -> str:
        if "needs_plugin" in self.faults:
            raise CheckFailure("the plan does not load without the plugin")
        return "30 inputs and outputs"

    def engine(self, *, cuda_graphs: bool) -> Any:
        return Engine(noise=self.faults.get("noise", 1e-3), captured=cuda_graphs, faults=self.faults)

    def oracle(self) -> Any:
        return Engine(noise=0.0, captured=False, faults={})

    def binding(self, name: str) -> tuple[str, str]:
        assert name == "key_pool.0"
        binding: tuple[str, str] = self.faults.get("binding", ("FP8", "Row major linear FP8 format (kLINEAR)"))
        return binding

    def captured(self, engine: Any) -> int:
        return 0 if "uncaptured" in self.faults else int(engine.captured)

    def far_shared_memory(self, size: int) -> npt.NDArray[np.float32]:
        assert size > 48 * 1024
        return np.arange(1, 33, dtype=np.float32) * (0 if "shared" in self.faults else 1)

    def append_in_place(self) -> tuple[dict[str, Any], dict[str, Any]]:
        expected = np.arange(8, dtype=np.float16)
        return {"key_pool": expected + ("append" in self.faults)}, {"key_pool": expected}

    def change_shape(self, times: int) -> None:
        self.changes += times
        self.free -= self.faults.get("leak", 0) * times

    def free_bytes(self) -> int:
        return self.free


class Engine:
    """Logits that depend on all tokens of a sequence and on the scale of the keys."""

    vocab_size = 16

    def __init__(self, noise: float, captured: bool, faults: Mapping[str, Any]) -> None:
        self.noise, self.captured, self.faults = noise, captured, faults
        self.scale = 1.0
        self.sequences: list[list[int]] = []

    def prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[list[int], npt.NDArray[np.float32]]:
        self.sequences += [list(prompt) for prompt in prompts]
        handles = list(range(len(self.sequences) - len(prompts), len(self.sequences)))
        return handles, np.stack([self.logits(handle) for handle in handles])

    def decode(self, handles: Sequence[int], tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        for handle, token in zip(handles, tokens, strict=True):
            self.sequences[handle].append(token)
        return np.stack([self.logits(handle) for handle in handles])

    def logits(self, handle: int) -> npt.NDArray[np.float32]:
        seed = np.random.default_rng(self.sequences[handle]).normal(size=self.vocab_size).astype(np.float32)
        out = seed * (1.0 if "blind" in self.faults else self.scale) * (1 + self.noise)
        if "nan" in self.faults:
            out[0] = np.nan
        return out + (1e-3 if self.captured and "replay" in self.faults else 0)

    def stored(self, handle: int) -> list[dict[Side, StoredCopy]]:
        codes = np.ones((2, len(self.sequences[handle]), 4), np.uint8)
        if "lost" in self.faults:
            codes[:, -1] = 0
        return [{Side.KEY: StoredCopy(0, codes, None, None, None, None)}]

    def corrupt_key_scale(self, factor: float) -> None:
        self.scale *= factor


@pytest.mark.parametrize("name", CHECKS)
def test_a_machine_that_does_everything_passes(name: str) -> None:
    verdict, reason = judge(name, Bench)
    assert (verdict, bool(reason)) == ("PASS", True), reason


@pytest.mark.parametrize(
    ("name", "faults", "reason"),
    [
        ("plugin load", {"operations": True}, "1 of 2 operations are not in TensorRT's registry, first kv::decode_reduce"),
        ("run-time load", {"nodes": []}, "no plugin node"),
        ("run-time load", {"needs_plugin": True}, "does not load without the plugin"),
        ("launch", {"nan": True}, "logits of 3 of 3 sequences are not finite"),
        ("shared memory above 48 KB", {"shared": True}, r"65536 bytes .* read back \[0.0, 0.0, 0.0, 0.0\]"),
        ("FP8 bindings", {"binding": ("UINT8", "linear")}, "key_pool.0 is bound as UINT8"),
        ("FP8 bindings", {"binding": ("FP8", "Thirty-two wide channel vectorized")}, "key_pool.0 is bound as FP8, Thirty-two"),
        ("FP8 bindings", {"blind": True}, "not read where it is bound"),
        ("append in place", {"append": True}, r"\d+ of 16 bytes of key_pool"),
        ("append in place", {"lost": True}, "keys of layer 0: 1 of 73 tokens are not in the pool, first token 72"),
        ("logits against the oracle", {"noise": 2.0}, r"mean KL to the oracle is \S+ nats a token, above 0.01"),
        ("logits against the oracle", {"blind": True}, "the logits are not the cache's"),
        ("logits against the oracle", {"nan": True}, "mean KL to the oracle is nan"),
        ("CUDA graph", {"uncaptured": True}, "no decode step was captured"),
        ("CUDA graph", {"replay": True}, "replayed steps give other logits"),
        ("leak over shape changes", {"leak": 10_000}, "10,000 bytes of device memory are lost a shape change"),
    ],
)
def test_what_is_wrong_fails_its_check_with_the_reason(name: str, faults: dict[str, Any], reason: str) -> None:
    with pytest.raises(CheckFailure, match=reason):
        CHECKS[name](Bench(**faults))
    assert judge(name, lambda: Bench(**faults))[0] == "FAIL"


def test_what_the_machine_lacks_is_no_failure() -> None:
    def bench() -> Bench:
        raise MissingRequirement("no TensorRT")

    assert judge("launch", bench) == ("CANNOT RUN", "no TensorRT")


def test_a_policy_without_fp8_keys_has_no_binding_to_check() -> None:
    verdict, reason = judge("FP8 bindings", lambda: Bench(keys="int8"))
    assert verdict == "CANNOT RUN"
    assert reason.startswith("kv=some: keys of layer 0 are int8, not fp8_e4m3")


def test_what_is_allocated_once_is_no_leak() -> None:
    bench = Bench()
    checks.leak(bench)
    assert bench.changes == checks.SHAPE_CHANGES * 5 // 4
