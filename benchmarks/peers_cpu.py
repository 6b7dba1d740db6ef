"""Compares kvgate with other CPU engines that quantize their KV cache: `python -m benchmarks.peers_cpu`.

All engines get the same checkpoint, texts, threads and forced tokens. Every format runs alone, in a separate process. Its
distance is measured to the same engine's float cache. README.md has the details.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from benchmarks.documentation import CALIBRATION_TOKENS, MODEL, all_tokens, convert_once, start_positions
from benchmarks.recording import ROOT, log, machine, results_record, version, write_json
from stages.checkpoints.places import GGUF_SUFFIX, locate_checkpoint
from stages.evaluate.distances.distance import kl_of_logits

Logits = npt.NDArray[np.float32]
Cell = dict[str, Any]
PREPARE = "prepare"
WARM_UP = 8
"""Tokens of an untimed prefill before the measurement."""


@dataclass(frozen=True)
class PeerSetting:
    """Settings that all formats of a peer share."""

    checkpoint: str
    models: str
    """Folder of the model in the peer's format."""
    threads: int
    capacity: int
    """Maximum tokens of a sequence."""
    calibration: list[int]
    """Tokens for static scales."""


class Peer(ABC):
    """An engine with one KV format, which decodes a sequence step by step."""

    title: ClassVar[str]
    distributions: ClassVar[tuple[str, ...]]
    """Packages whose versions are recorded."""
    install: ClassVar[str] = ""
    """Arguments of `pip install --target`."""
    formats: ClassVar[dict[str, str]]
    """Width by KV format; the first format is float."""

    def __init__(self, kv: str, setting: PeerSetting) -> None:
        self.kv, self.setting, self.models = kv, setting, Path(setting.models)

    @classmethod
    @abstractmethod
    def prepare(cls, setting: PeerSetting) -> None:
        """Convert the checkpoint to the engine's format, unless it is converted already."""

    @abstractmethod
    def start(self) -> None:
        """Drop the previous sequence and start a new one."""

    @abstractmethod
    def feed(self, tokens: Sequence[int]) -> Logits:
        """Append the prompt, and later single tokens, to the sequence; return the logits (V,) after the last token."""

    @abstractmethod
    def bytes_per_token(self) -> float:
        """Return the bytes of the cache per token."""


class Kvgate(Peer):
    """kvgate's embedded engine: ONNX Runtime over the paged pool, in float32."""

    title = "kvgate, ONNX engine"
    distributions = ("onnxruntime", "torch", "transformers")
    formats: ClassVar = {"fp16": "float", "fp8": "8 bit", "int8": "8 bit", "fp8k_int4v": "4 bit", "int4_g32": "4 bit"}

    def __init__(self, kv: str, setting: PeerSetting) -> None:
        from stages.engines.onnx.engine import load_engine

        super().__init__(kv, setting)
        self.engine = load_engine(self.models / kv, threads=setting.threads)
        self.handles: list[int] = []

    @classmethod
    def prepare(cls, setting: PeerSetting) -> None:
        from benchmarks import benchlib

        checkpoint, models = Path(setting.checkpoint), Path(setting.models)
        shutil.rmtree(models, ignore_errors=True)  # built from this checkout's code in every run
        models.mkdir(parents=True)
        scales = benchlib.static_scales_on(checkpoint, [setting.calibration])
        for policy in map(benchlib.load_policy, cls.formats):
            benchlib.make_bundle(policy, scales(policy), models, checkpoint)

    def start(self) -> None:
        self.engine.release(self.handles)
        self.handles = []

    def feed(self, tokens: Sequence[int]) -> Logits:
        if self.handles:
            return np.asarray(self.engine.decode(self.handles, tokens)[0], np.float32)
        self.handles, logits = self.engine.prefill([list(tokens)])
        return np.asarray(logits[0], np.float32)

    def bytes_per_token(self) -> float:
        return self.engine.policy.bytes_per_token(self.engine.shape)


class Genai(Peer):
    """onnxruntime-genai in float32: its model builder, its calibration of static scales per channel, and its generator."""

    title = "onnxruntime-genai"
    distributions = ("onnxruntime-genai", "onnxruntime")
    install = "--no-deps onnxruntime-genai==0.18.0"
    formats: ClassVar = {"float32": "float", "int8_per_channel": "8 bit", "int4_per_channel": "4 bit"}

    def __init__(self, kv: str, setting: PeerSetting) -> None:
        # onnxruntime-genai finds ONNX Runtime's library only if the library is already loaded.
        import onnxruntime  # noqa: F401  isort: skip
        import onnxruntime_genai as og

        super().__init__(kv, setting)
        config = og.Config(str(self.models / kv))
        config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": setting.threads}}}}))
        self.og, self.model, self.generator = og, og.Model(config), None
        self.shape = json.loads((self.models / kv / "genai_config.json").read_text())["model"]["decoder"]

    @classmethod
    def prepare(cls, setting: PeerSetting) -> None:
        models = Path(setting.models)
        scales = models / "kv_scales.json"
        for kv, width in cls.formats.items():
            scheme = [] if width == "float" else [f"kv_cache_quant_scheme={kv}", f"kv_cache_scale_file={scales}"]
            if width != "float" and not scales.exists():
                cls._calibrate(setting, models, scales)
            if not (models / kv).exists():
                parts = ["-m", "local", "-i", setting.checkpoint, "-o", str(models / f"{kv}.part"), "-p", "fp32", "-e", "cpu"]
                options = ["--extra_options", "prune_lm_head=true", *scheme]
                run_python("-m", "onnxruntime_genai.models.builder", *parts, *options)
                (models / f"{kv}.part").rename(models / kv)

    @classmethod
    def _calibrate(cls, setting: PeerSetting, models: Path, out: Path) -> None:
        """Measure scales over kvgate's calibration text, in windows of 512 tokens, the tool's default."""
        from stages.checkpoints.loading import load_tokenizer

        corpus = models / "calibration.txt"
        corpus.write_text(load_tokenizer(Path(setting.checkpoint)).decode(setting.calibration))
        windows = str(max(1, len(setting.calibration) // 512 - 1))
        parts = ["--model", str(models / next(iter(cls.formats))), "--tokenizer", setting.checkpoint, "--out", str(out)]
        tool = "onnxruntime_genai.models.quantization.kv_cache_calibration"
        run_python("-m", tool, *parts, "--corpus-file", str(corpus), "--num-seqs", windows)

    def start(self) -> None:
        parameters = self.og.GeneratorParams(self.model)
        # The generator would stop at an end token.
        parameters.set_search_options(max_length=self.setting.capacity, min_length=self.setting.capacity)
        self.generator = self.og.Generator(self.model, parameters)

    def feed(self, tokens: Sequence[int]) -> Logits:
        assert self.generator is not None
        self.generator.append_tokens(np.array([tokens], np.int32))
        logits = np.asarray(self.generator.get_logits(), np.float32)
        return np.asarray(logits.reshape(-1, logits.shape[-1])[-1])

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
    """OpenVINO: optimum-intel's stateful model on the CPU plugin, with an explicit KV_CACHE_PRECISION.

    By default, the plugin computes in bfloat16 if the processor supports it.
    """

    title = "OpenVINO"
    distributions = ("openvino", "optimum-intel", "nncf", "transformers")
    install = (
        "--no-deps openvino==2026.4.1 openvino-telemetry optimum-intel==2.2.0 optimum==2.3.0 nncf==3.4.0 "
        "transformers==5.5.4 tabulate pydot natsort"
    )
    formats: ClassVar = {"f16": "float", "u8": "8 bit", "u4": "4 bit"}

    def __init__(self, kv: str, setting: PeerSetting) -> None:
        import openvino as ov
        from openvino import opset13

        super().__init__(kv, setting)
        core = ov.Core()
        model = core.read_model(self.models / "model" / "openvino_model.xml")
        # Slice the last token before the projection to logits, as OpenVINO GenAI does.
        projection = model.get_results()[0].input_value(0).get_node()
        bounds = [np.array([value]) for value in (-1, np.iinfo(np.int64).max, 1, 1)]
        projection.input(0).replace_source_output(opset13.slice(projection.input_value(0), *bounds).output(0))
        model.validate_nodes_and_infer_types()
        options = {"INFERENCE_NUM_THREADS": setting.threads, "NUM_STREAMS": 1, "PERFORMANCE_HINT": "LATENCY"}
        options |= {"ENABLE_CPU_PINNING": False, "KV_CACHE_PRECISION": kv}
        self.request: Any = core.compile_model(model, "CPU", options).create_infer_request()
        self.length = 0

    @classmethod
    def prepare(cls, setting: PeerSetting) -> None:
        target, part = (Path(setting.models) / name for name in ("model", "model.part"))
        if not target.exists():
            run_python("-c", OPENVINO_EXPORT, setting.checkpoint, str(part))
            part.rename(target)

    def start(self) -> None:
        self.request.reset_state()
        self.length = 0

    def feed(self, tokens: Sequence[int]) -> Logits:
        start, self.length = self.length, self.length + len(tokens)
        inputs = {
            "input_ids": np.array([tokens], np.int64),
            "attention_mask": np.ones((1, self.length), np.int64),
            "position_ids": np.arange(start, self.length)[None],
            "beam_idx": np.zeros(1, np.int32),
        }
        return np.array(self.request.infer(inputs)["logits"][0, -1], np.float32)

    def bytes_per_token(self) -> float:
        config = json.loads((Path(self.setting.checkpoint) / "config.json").read_text())
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        # Codes and, for one group per head, a float32 scale and zero point.
        vector = head_dim * {"f16": 16, "u8": 8, "u4": 4}[self.kv] / 8 + (0 if self.kv == "f16" else 8)
        return float(2 * config["num_hidden_layers"] * config["num_key_value_heads"] * vector)


PEERS: dict[str, type[Peer]] = {"kvgate": Kvgate, "genai": Genai, "openvino": OpenVino}


def run_python(*arguments: str) -> None:
    """Run Python in a separate process, so that its imports do not occupy memory while an engine is timed."""
    process = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
    if process.returncode:
        raise RuntimeError(f"{arguments[1][:60].strip()} failed: {process.stderr.strip()[-600:]}")


def measure(engine: Peer, tokens: Sequence[int], context: int, logits: Path) -> Cell:
    """Time a prefill of `context` tokens and a step for every further token; write the steps' logits (N, V) to a file."""
    engine.start()
    engine.feed(tokens[:WARM_UP])
    begun = time.process_time()
    engine.start()
    engine.feed(tokens[:context])
    ends, rows = [time.process_time()], []
    for token in tokens[context:]:
        rows.append(engine.feed([token]))
        ends.append(time.process_time())
    np.save(logits, np.stack(rows))
    step = statistics.median(np.diff(ends).tolist())
    return {"bytes_per_token": engine.bytes_per_token(), "first_token_cpu_s": ends[0] - begun, "step_cpu_s": step}


def run_job() -> None:
    """Prepare a peer or measure one format, as the JSON on stdin requests. Print the result or the error as the last line."""
    job = json.load(sys.stdin)
    peer, setting = PEERS[job["peer"]], PeerSetting(**job["setting"])
    Path(setting.models).mkdir(parents=True, exist_ok=True)
    try:
        if job["kv"] == PREPARE:
            peer.prepare(setting)
            result: Cell = {"versions": {name: version(name) for name in peer.distributions}}
        else:
            result = measure(peer(job["kv"], setting), job["tokens"], job["context"], Path(job["logits"]))
    except Exception as error:  # a peer's failure is a result
        result = {"cannot": f"{type(error).__name__}: {error}"}
    print(json.dumps(result))


def run_in_process(sites: Path, peer: str, kv: str, setting: PeerSetting, **fields: Any) -> Cell:
    """Run a job in a separate process, with the peer's folder first on the module path. `fields`: further keys of the job."""
    job = json.dumps({"peer": peer, "kv": kv, "setting": asdict(setting), **fields})
    path = os.pathsep.join([str((sites / peer).resolve()), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    changes = {"OMP_NUM_THREADS": str(setting.threads), "HF_HUB_OFFLINE": "1", "PYTHONPATH": path}
    command = [sys.executable, "-m", "benchmarks.peers_cpu", "--job"]
    environment = os.environ | changes
    process = subprocess.run(command, input=job, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    if process.returncode:
        return {"cannot": f"its process ended with code {process.returncode}: {process.stderr.strip()[-300:]}"}
    result: Cell = json.loads(process.stdout.splitlines()[-1])
    return result


def table(cells: Sequence[Cell]) -> str:
    """Return a Markdown table of all formats."""
    rows = ["| tokens | engine | cache | bytes a token | mean KL | first token, CPU s | step, CPU ms |", "|---" * 7 + "|"]
    for cell in (cell for cell in cells if "cannot" not in cell):
        figures = f"{cell['mean_kl']:.1e} | {cell['first_token_cpu_s']:,.1f} | {1e3 * cell['step_cpu_s']:,.1f}"
        engine = f"| {cell['context']:,} | {PEERS[cell['peer']].title} | `{cell['kv']}` | {cell['bytes_per_token']:,.0f}"
        rows.append(f"{engine} | {figures} |")
    return "\n".join(rows)


def main() -> None:
    """Measure every format of every peer after every prompt, print the table and write the results."""
    parser = argparse.ArgumentParser("python -m benchmarks.peers_cpu", description=__doc__)
    parser.add_argument("--model", default=MODEL, help="a Hugging Face checkpoint or GGUF, as model.path names it")
    parser.add_argument("--json", type=Path, help="the results file")
    parser.add_argument("--threads", type=int, default=2, help="threads of every engine: the physical cores")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 4096, 8064], help="tokens of the prompts")
    parser.add_argument("--forced", type=int, default=64, help="tokens forced after each prompt, scored and timed")
    parser.add_argument("--peers", nargs="+", default=list(PEERS), choices=list(PEERS))
    parser.add_argument("--sites", type=Path, default=Path("work/peers"), help="where peers are installed, a folder each")
    parser.add_argument("--work", type=Path, default=Path("work/peers_cpu"), help="where models are written")
    parser.add_argument("--job", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        return run_job()
    source, work = locate_checkpoint(options.model), options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    checkpoint = convert_once(source, work / "checkpoint") if source.suffix == GGUF_SUFFIX else source
    tokens, capacity = all_tokens(checkpoint).tolist(), max(options.contexts) + options.forced + 1
    begins = start_positions(len(tokens), [context + options.forced for context in options.contexts])
    cells: list[Cell] = []
    for peer in options.peers:
        calibration = tokens[-CALIBRATION_TOKENS:]
        setting = PeerSetting(str(checkpoint.resolve()), str(work / peer), options.threads, capacity, calibration)
        prepared = run_in_process(options.sites, peer, PREPARE, setting)
        log(f"{PEERS[peer].title}: {prepared}")
        if "cannot" in prepared:
            log(f"  pip install --target {options.sites / peer} {PEERS[peer].install}")
            continue
        for context, begin in zip(options.contexts, begins, strict=True):
            text = tokens[begin : begin + context + options.forced]
            for kv, width in PEERS[peer].formats.items():
                logits, baseline = (work / f"{peer}-{name}.npy" for name in (kv, next(iter(PEERS[peer].formats))))
                fields = {"tokens": text, "context": context, "logits": str(logits)}
                result = run_in_process(options.sites, peer, kv, setting, **fields)
                if "cannot" not in result:
                    result["mean_kl"] = float(kl_of_logits(np.load(baseline), np.load(logits)).mean())
                cells.append({"context": context, "width": width, "peer": peer, "kv": kv, **result, **prepared})
                log(f"  {cells[-1]}")
    print(table(cells))
    write_json(options.json, {**results_record(cells), "machine": {**machine(), "threads": options.threads}})
    return None


if __name__ == "__main__":
    main()
