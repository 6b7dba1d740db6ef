"""onnxruntime-genai: its model builder, its calibration of static scales, its generator."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

# onnxruntime-genai finds ONNX Runtime's library only when it is already loaded, or beside itself.
import onnxruntime  # noqa: F401  isort: skip
import onnxruntime_genai as og

from benchmarks.peers_cpu.catalogue import peer_named
from benchmarks.peers_cpu.contender import CacheBytes, Contender, Logits, Setting
from stages.checkpoints import load_tokenizer

SCALES_FILE = "kv_scales.json"


def prepare(setting: Setting) -> None:
    """Build the float model, measure scales with it, and build the models with a quantized cache."""
    for kv in peer_named("genai").formats:
        target = setting.models / kv
        if target.exists():
            continue
        scheme = []
        if kv != peer_named("genai").baseline:
            scales = setting.models / SCALES_FILE
            if not scales.exists():
                _calibrate(setting, scales)
            scheme = [f"kv_cache_quant_scheme={kv}", f"kv_cache_scale_file={scales}"]
        parts = ["-m", "local", "-i", str(setting.checkpoint), "-o", str(target) + ".part", "-p", "fp32", "-e", "cpu"]
        _module("onnxruntime_genai.models.builder", *parts, "--extra_options", "prune_lm_head=true", *scheme)
        Path(str(target) + ".part").rename(target)


def _calibrate(setting: Setting, out: Path) -> None:
    """Measure scales over the text that kvgate's are measured over, in windows of 512 tokens, the tool's default."""
    corpus = setting.models / "calibration.txt"
    corpus.write_text(load_tokenizer(setting.checkpoint).decode(list(setting.calibration)))
    windows = str(max(1, len(setting.calibration) // 512 - 1))
    part = out.with_suffix(".part")
    model = setting.models / peer_named("genai").baseline
    _module(
        "onnxruntime_genai.models.quantization.kv_cache_calibration",
        *("--model", str(model), "--tokenizer", str(setting.checkpoint), "--out", str(part)),
        *("--corpus-file", str(corpus), "--num-seqs", windows),
    )
    content = json.loads(part.read_text())
    out.write_text(json.dumps(content))
    part.unlink()


def _module(name: str, *arguments: str) -> None:
    """Run a module of the package."""
    process = subprocess.run([sys.executable, "-m", name, *arguments], capture_output=True, text=True, check=False)
    if process.returncode:
        raise RuntimeError(f"{name} failed: {process.stderr.strip()[-600:]}")


def open_contender(kv: str, setting: Setting) -> Contender:
    """Return a contender of the model with this cache."""
    return GenaiContender(setting.models / kv, kv, setting)


class GenaiContender(Contender):
    """A generator of onnxruntime-genai, fed known tokens instead of its own."""

    def __init__(self, directory: Path, kv: str, setting: Setting) -> None:
        config = og.Config(str(directory))
        config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": setting.threads}}}}))
        self.model = og.Model(config)
        described = json.loads((directory / "genai_config.json").read_text())["model"]
        self.shape, self.vocabulary = described["decoder"], int(described["vocab_size"])
        self.kv, self.setting = kv, setting
        self.prompt: list[int] = []
        self.generator: Any = None

    def _start(self, rows: Sequence[Sequence[int]]) -> Logits:
        self.generator = None
        parameters = og.GeneratorParams(self.model)
        # A row that reached its end would stop working, and the others with less work would be faster.
        parameters.set_search_options(max_length=self.setting.capacity, min_length=self.setting.capacity, batch_size=len(rows))
        self.generator = og.Generator(self.model, parameters)
        return self._append(rows)

    def _append(self, rows: Sequence[Sequence[int]]) -> Logits:
        self.generator.append_tokens(np.array(rows, np.int32))
        return self._logits(len(rows))

    def _logits(self, batch: int) -> Logits:
        logits: Logits = np.asarray(self.generator.get_logits(), np.float32).reshape(batch, -1, self.vocabulary)[:, -1]
        return logits

    def prefill(self, tokens: Sequence[int]) -> Logits:
        self.prompt = list(tokens)
        return np.asarray(self._start([self.prompt])[0])

    def replicate(self, batch: int) -> None:
        # Its generator does not hand out the cache: the sequences are prefilled, all in one run.
        self.setting.check_batch_prefill(batch * len(self.prompt))
        self._start([self.prompt] * batch)

    def step(self, tokens: Sequence[int]) -> Logits:
        if len(tokens) == 1:
            self.prompt.append(int(tokens[0]))
            return self._append([tokens])
        # It takes tokens of a batch only as prompts: a batch goes on with its own greedy tokens, which takes the same time.
        self.generator.generate_next_token()
        return self._logits(len(tokens))

    def cache_bytes(self) -> CacheBytes:
        bits = {"float32": 32, "int8_per_channel": 8, "int4_per_channel": 4}[self.kv]
        elements = 2 * self.shape["num_hidden_layers"] * self.shape["num_key_value_heads"] * self.shape["head_size"]
        return CacheBytes(elements * bits / 8, "computed: elements of present.*.key and .value; scales are static")

    def close(self) -> None:
        self.generator = None
