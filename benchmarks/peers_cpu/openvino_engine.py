"""OpenVINO: optimum-intel's stateful model on the CPU plugin, whose attention holds the cache in KV_CACHE_PRECISION.

It is the path of OpenVINO GenAI with ATTENTION_BACKEND=SDPA. Driven by the runtime itself, every step returns all logits.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino as ov
from openvino import opset13

from benchmarks.peers_cpu.contender import CacheBytes, Contender, Logits, Setting

MODEL = "model"

EXPORT = """
import sys
from optimum.intel import OVModelForCausalLM
model = OVModelForCausalLM.from_pretrained(sys.argv[1], export=True, compile=False, load_in_8bit=False, local_files_only=True)
model.save_pretrained(sys.argv[2])
"""
"""Runs in a process of its own, so that torch and transformers hold no memory while the plugin is timed."""


def prepare(setting: Setting) -> None:
    """Export the checkpoint as optimum-intel does."""
    target, part = setting.models / MODEL, setting.models / f"{MODEL}.part"
    if not target.exists():
        command = [sys.executable, "-c", EXPORT, str(setting.checkpoint), str(part)]
        process = subprocess.run(command, capture_output=True, text=True, check=False)
        if process.returncode:
            raise RuntimeError(f"optimum-intel's export failed: {process.stderr.strip()[-600:]}")
        part.rename(target)


def _compiled(kv: str, setting: Setting) -> Any:
    """The model compiled for a cache precision."""
    core = ov.Core()
    model = core.read_model(setting.models / MODEL / "openvino_model.xml")
    _last_logits_only(model)
    options = {
        "INFERENCE_NUM_THREADS": setting.threads,
        "NUM_STREAMS": 1,
        "PERFORMANCE_HINT": "LATENCY",
        "ENABLE_CPU_PINNING": False,
        "KV_CACHE_PRECISION": kv,
    }
    return core.compile_model(model, "CPU", options)


def _last_logits_only(model: Any) -> None:
    """Slice the last token before the projection to logits, as OpenVINO GenAI does with the same model."""
    projection = model.get_results()[0].input_value(0).get_node()
    bounds = [np.array([value]) for value in (-1, np.iinfo(np.int64).max, 1, 1)]
    last = opset13.slice(projection.input_value(0), *bounds)
    projection.input(0).replace_source_output(last.output(0))
    model.validate_nodes_and_infer_types()


def open_contender(kv: str, setting: Setting) -> Contender:
    """Return a contender with this cache precision."""
    config = json.loads((setting.checkpoint / "config.json").read_text())
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    vectors = 2 * config["num_hidden_layers"] * config["num_key_value_heads"]
    return OpenvinoContender(_compiled(kv, setting), kv, setting, vectors * _vector_bytes(kv, head_dim))


def _vector_bytes(kv: str, head_dim: int) -> float:
    """Bytes of a head's key or value: codes and, with a cache group of the whole head, a float32 scale and zero point."""
    return head_dim * {"f16": 16, "u8": 8, "u4": 4}[kv] / 8 + (0 if kv == "f16" else 8)


class OpenvinoContender(Contender):
    """An infer request of the compiled model."""

    def __init__(self, compiled: Any, kv: str, setting: Setting, bytes_per_token: float) -> None:
        self.compiled, self.kv, self.setting, self.bytes_per_token = compiled, kv, setting, bytes_per_token
        self.request: Any = None
        self.length = 0
        self.tokens: list[int] = []
        """Of the one sequence, before it is replicated."""

    def start(self) -> None:
        """Drop all sequences."""
        if self.request is None:
            self.request = self.compiled.create_infer_request()
        self.request.reset_state()
        self.length = 0

    def feed(self, ids: npt.NDArray[np.int64], parents: Sequence[int] | None = None) -> Logits:
        """Append tokens (B, S); returns the logits (B, V) of the last."""
        batch, tokens = ids.shape
        end = self.length + tokens
        inputs = {
            "input_ids": ids,
            "attention_mask": np.ones((batch, end), np.int64),
            "position_ids": np.tile(np.arange(self.length, end), (batch, 1)),
            "beam_idx": np.array(range(batch) if parents is None else parents, np.int32),
        }
        self.length = end
        return np.asarray(self.request.infer(inputs)["logits"][:, -1], np.float32)

    def prefill(self, tokens: Sequence[int]) -> Logits:
        self.start()
        self.tokens = list(tokens)
        return np.asarray(self.feed(np.array([self.tokens], np.int64))[0])

    def replicate(self, batch: int) -> None:
        if self.kv == "u4":
            # Release 2026.4.1 copies u4 rows wrongly when the batch grows, so that they are prefilled.
            self.setting.check_batch_prefill(batch * len(self.tokens))
            self.start()
            self.feed(np.array([self.tokens] * batch, np.int64))
            return
        # A step whose rows all continue row 0 makes the plugin copy its cache for each of them.
        self.feed(np.full((batch, 1), self.tokens[-1], np.int64), parents=[0] * batch)

    def step(self, tokens: Sequence[int]) -> Logits:
        if len(tokens) == 1:
            self.tokens.append(int(tokens[0]))
        return self.feed(np.array(tokens, np.int64)[:, None])

    def cache_bytes(self) -> CacheBytes:
        return CacheBytes(self.bytes_per_token, "computed: codes, and a float32 scale and zero point a head vector")

    def close(self) -> None:
        self.request = None
