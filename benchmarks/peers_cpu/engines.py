"""The engines that are compared: a class each, which imports its library when it is opened."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from benchmarks.peers_cpu.peer import Logits, Peer, Setting, run_python


class Kvgate(Peer):
    """kvgate's embedded engine: ONNX Runtime over the paged pool."""

    title = "kvgate, ONNX engine"
    modules = distributions = ("onnxruntime", "torch", "transformers")
    install = ""
    formats: ClassVar = {"fp16": "float", "fp8": "8 bit", "int8": "8 bit", "fp8k_int4v": "4 bit", "int4_g32": "4 bit"}
    weights = "float32"

    def __init__(self, kv: str, setting: Setting) -> None:
        from stages.engines.onnx.engine import load_engine

        super().__init__(kv, setting)
        self.engine = load_engine(setting.models / kv, threads=setting.threads)
        self.handles: list[int] = []

    @classmethod
    def prepare(cls, setting: Setting) -> None:
        from benchmarks import benchlib

        # Built of this checkout's code in every run.
        shutil.rmtree(setting.models, ignore_errors=True)
        setting.models.mkdir(parents=True)
        scales = benchlib.static_scales_on(setting.checkpoint, [setting.calibration])
        for name in cls.formats:
            policy = benchlib.load_policy(name)
            benchlib.make_bundle(policy, scales(policy), setting.models, setting.checkpoint)

    def prefill(self, tokens: Sequence[int]) -> Logits:
        self.engine.release(self.handles)
        self.handles, logits = self.engine.prefill([list(tokens)])
        return np.asarray(logits[0], np.float32)

    def replicate(self, batch: int) -> None:
        # A fork shares the pages of its parent. Eight conversations share none, so that shared ones are copied.
        pool = self.engine.pool
        (parent,) = self.handles
        shared = set(pool.sequences[parent].pages)
        for _ in range(batch - 1):
            child = self.engine.fork(parent)
            pages = pool.sequences[child].pages
            for index, page in enumerate(pages):
                if page in shared:
                    pages[index] = pool._copy(pool.pages, page)
                    pool.pages.free(page)
            self.handles.append(child)

    def step(self, tokens: Sequence[int]) -> Logits:
        return np.asarray(self.engine.decode(self.handles, list(tokens)), np.float32)

    def bytes_per_token(self) -> float:
        return self.engine.policy.bytes_per_token(self.engine.shape)


class Genai(Peer):
    """onnxruntime-genai: its model builder, its calibration of static scales, its generator."""

    title = "onnxruntime-genai"
    modules = ("onnxruntime", "onnxruntime_genai")
    distributions = ("onnxruntime-genai", "onnxruntime")
    install = "--no-deps onnxruntime-genai==0.18.0"
    formats: ClassVar = {"float32": "float", "int8_per_channel": "8 bit", "int4_per_channel": "4 bit"}
    weights = "float32"

    def __init__(self, kv: str, setting: Setting) -> None:
        # onnxruntime-genai finds ONNX Runtime's library only when it is already loaded, or beside itself.
        import onnxruntime  # noqa: F401  isort: skip
        import onnxruntime_genai as og

        super().__init__(kv, setting)
        self.og, directory = og, setting.models / kv
        config = og.Config(str(directory))
        config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": setting.threads}}}}))
        self.model = og.Model(config)
        described = json.loads((directory / "genai_config.json").read_text())["model"]
        self.shape, self.vocabulary = described["decoder"], int(described["vocab_size"])
        self.prompt: list[int] = []
        self.generator: Any = None

    @classmethod
    def prepare(cls, setting: Setting) -> None:
        scales, builder = setting.models / "kv_scales.json", "onnxruntime_genai.models.builder"
        for kv, width in cls.formats.items():
            target, part = setting.models / kv, setting.models / f"{kv}.part"
            if target.exists():
                continue
            if width != "float" and not scales.exists():
                cls._calibrate(setting, scales)
            scheme = [] if width == "float" else [f"kv_cache_quant_scheme={kv}", f"kv_cache_scale_file={scales}"]
            parts = ["-m", "local", "-i", str(setting.checkpoint), "-o", str(part), "-p", "fp32", "-e", "cpu"]
            run_python("-m", builder, *parts, "--extra_options", "prune_lm_head=true", *scheme)
            part.rename(target)

    @classmethod
    def _calibrate(cls, setting: Setting, out: Path) -> None:
        """Measure scales over the text that kvgate's are measured over, in windows of 512 tokens, the tool's default."""
        from stages.checkpoints import load_tokenizer

        corpus, part = setting.models / "calibration.txt", out.with_suffix(".part")
        corpus.write_text(load_tokenizer(setting.checkpoint).decode(list(setting.calibration)))
        windows, model = str(max(1, len(setting.calibration) // 512 - 1)), setting.models / next(iter(cls.formats))
        parts = ["--model", str(model), "--tokenizer", str(setting.checkpoint), "--out", str(part)]
        tool = "onnxruntime_genai.models.quantization.kv_cache_calibration"
        run_python("-m", tool, *parts, "--corpus-file", str(corpus), "--num-seqs", windows)
        part.rename(out)

    def _start(self, rows: Sequence[Sequence[int]]) -> Logits:
        self.generator = None
        parameters = self.og.GeneratorParams(self.model)
        # A row that reached its end would stop working, and the others with less work would be faster.
        length = self.setting.capacity
        parameters.set_search_options(max_length=length, min_length=length, batch_size=len(rows))
        self.generator = self.og.Generator(self.model, parameters)
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

    def bytes_per_token(self) -> float:
        bits = {"float": 32, "8 bit": 8, "4 bit": 4}[self.formats[self.kv]]
        elements = 2 * self.shape["num_hidden_layers"] * self.shape["num_key_value_heads"] * self.shape["head_size"]
        return float(elements * bits / 8)


OPENVINO_EXPORT = """
import sys
from optimum.intel import OVModelForCausalLM
model = OVModelForCausalLM.from_pretrained(sys.argv[1], export=True, compile=False, load_in_8bit=False, local_files_only=True)
model.save_pretrained(sys.argv[2])
"""


class OpenVino(Peer):
    """OpenVINO: optimum-intel's stateful model on the CPU plugin, whose attention holds the cache in KV_CACHE_PRECISION.

    It is the path of OpenVINO GenAI with ATTENTION_BACKEND=SDPA. Driven by the runtime itself, every step returns all logits.
    """

    title = "OpenVINO"
    modules = ("openvino", "optimum.intel")
    distributions = ("openvino", "optimum-intel", "nncf", "transformers")
    install = (
        "--no-deps openvino==2026.4.1 openvino-telemetry optimum-intel==2.2.0 optimum==2.3.0 nncf==3.4.0 "
        "transformers==5.5.4 tabulate pydot natsort"
    )
    formats: ClassVar = {"f16": "float", "u8": "8 bit", "u4": "4 bit"}
    weights = "float16, as the plugin holds them"
    precision: ClassVar[dict[str, str]] = {}
    """Where this processor has bfloat16 products, the plugin's default computes in these."""

    def __init__(self, kv: str, setting: Setting) -> None:
        import openvino as ov
        from openvino import opset13

        super().__init__(kv, setting)
        core = ov.Core()
        model = core.read_model(setting.models / "model" / "openvino_model.xml")
        # The last token is sliced before the projection to logits, as OpenVINO GenAI does with the same model.
        projection = model.get_results()[0].input_value(0).get_node()
        bounds = [np.array([value]) for value in (-1, np.iinfo(np.int64).max, 1, 1)]
        projection.input(0).replace_source_output(opset13.slice(projection.input_value(0), *bounds).output(0))
        model.validate_nodes_and_infer_types()
        options = {"INFERENCE_NUM_THREADS": setting.threads, "NUM_STREAMS": 1, "PERFORMANCE_HINT": "LATENCY"}
        options |= {"ENABLE_CPU_PINNING": False, "KV_CACHE_PRECISION": kv, **self.precision}
        self.request: Any = core.compile_model(model, "CPU", options).create_infer_request()
        self.length = 0
        self.tokens: list[int] = []
        """Of the one sequence, before it is replicated."""

    @classmethod
    def prepare(cls, setting: Setting) -> None:
        target, part = setting.models / "model", setting.models / "model.part"
        if not target.exists():
            run_python("-c", OPENVINO_EXPORT, str(setting.checkpoint), str(part))
            part.rename(target)

    def _feed(self, ids: npt.NDArray[np.int64], parents: Sequence[int] | None = None) -> Logits:
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

    def _start(self, rows: Sequence[Sequence[int]]) -> Logits:
        self.request.reset_state()
        self.length = 0
        return self._feed(np.array(rows, np.int64))

    def prefill(self, tokens: Sequence[int]) -> Logits:
        self.tokens = list(tokens)
        return np.asarray(self._start([self.tokens])[0])

    def replicate(self, batch: int) -> None:
        if self.kv == "u4":
            # Release 2026.4.1 copies u4 rows wrongly when the batch grows, so that they are prefilled.
            self.setting.check_batch_prefill(batch * len(self.tokens))
            self._start([self.tokens] * batch)
            return
        # A step whose rows all continue row 0 makes the plugin copy its cache for each of them.
        self._feed(np.full((batch, 1), self.tokens[-1], np.int64), parents=[0] * batch)

    def step(self, tokens: Sequence[int]) -> Logits:
        if len(tokens) == 1:
            self.tokens.append(int(tokens[0]))
        return self._feed(np.array(tokens, np.int64)[:, None])

    def bytes_per_token(self) -> float:
        config = json.loads((self.setting.checkpoint / "config.json").read_text())
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        # Codes and, with a cache group of the whole head, a float32 scale and zero point.
        vector = head_dim * {"f16": 16, "u8": 8, "u4": 4}[self.kv] / 8 + (0 if self.kv == "f16" else 8)
        return float(2 * config["num_hidden_layers"] * config["num_key_value_heads"] * vector)


class OpenVinoFloat32(OpenVino):
    """OpenVINO in the arithmetic of kvgate and onnxruntime-genai."""

    title = "OpenVINO, float32"
    precision: ClassVar = {"INFERENCE_PRECISION_HINT": "f32"}


PEERS: dict[str, type[Peer]] = {
    "kvgate": Kvgate,
    "genai": Genai,
    "openvino": OpenVino,
    "openvino_float32": OpenVinoFloat32,
}
