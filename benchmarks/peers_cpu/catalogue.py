"""Who is compared: each peer's packages, how to install them, and its KV formats."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Width = Literal["float", "8 bit", "4 bit"]

WIDTHS: tuple[Width, ...] = ("float", "8 bit", "4 bit")
"""Formats of one width take turns, so that a disturbance of the machine hits all of them. Float comes first: it is what the
others of the same peer are held against."""


@dataclass(frozen=True)
class Peer:
    """An engine and its KV formats."""

    name: str
    title: str
    module: str
    """The module beside this one that drives it."""
    modules: tuple[str, ...]
    """What must be importable in its process."""
    distributions: tuple[str, ...]
    """Whose versions are recorded."""
    install: str
    """Arguments of `pip install`, "" for what kvgate's own extras bring."""
    formats: dict[str, Width]
    """Its KV formats; the first is its float baseline."""
    weights: str
    """Type of the weights in its products."""
    prefill: str
    """The path that a prompt takes."""
    note: str
    """What a reader has to know to compare it."""

    @property
    def baseline(self) -> str:
        """The format that its others are held against."""
        return next(iter(self.formats))

    def install_command(self, sites: Path) -> str:
        """The command that installs what its process needs."""
        if not self.install:
            return "pip install -e '.[bench]'"
        return f"pip install --target {sites / self.name} {self.install}"


PEERS: tuple[Peer, ...] = (
    Peer(
        name="kvgate",
        title="kvgate, ONNX engine",
        module="kvgate_engine",
        modules=("onnxruntime", "torch", "transformers"),
        distributions=("onnxruntime", "torch", "transformers", "numpy"),
        install="",
        formats={
            "fp16": "float",
            "fp8": "8 bit",
            "fp8_token": "8 bit",
            "int8": "8 bit",
            "fp8k_int4v": "4 bit",
            "int4_g32": "4 bit",
            "int4_hadamard": "4 bit",
        },
        weights="float32",
        prefill="chunks of 1,024 tokens, which attend over the quantized cache of those before",
        note="static scales of fp8 and fp8k_int4v: the largest magnitude over 2,048 tokens of other text",
    ),
    Peer(
        name="genai",
        title="onnxruntime-genai",
        module="genai_engine",
        modules=("onnxruntime", "onnxruntime_genai"),
        distributions=("onnxruntime-genai", "onnxruntime"),
        install="--no-deps onnxruntime-genai==0.18.0",
        formats={"float32": "float", "int8_per_channel": "8 bit", "int4_per_channel": "4 bit"},
        weights="float32",
        prefill="whole prompt at once; prune_lm_head=true",
        note="static scales a channel, by its own kv_cache_calibration over the text of kvgate's; allocates max_length ahead",
    ),
    Peer(
        name="openvino",
        title="OpenVINO",
        module="openvino_engine",
        modules=("openvino", "optimum.intel"),
        distributions=("openvino", "optimum-intel", "nncf", "transformers"),
        install="--no-deps openvino==2026.4.1 openvino-telemetry optimum-intel==2.2.0 optimum==2.3.0 nncf==3.4.0 "
        "transformers==5.5.4 tabulate pydot natsort",
        formats={"f16": "float", "u8": "8 bit", "u4": "4 bit"},
        weights="float16, as the plugin holds them",
        prefill="whole prompt at once, logits of the last token only",
        note="u8 is what KV_CACHE_PRECISION defaults to on a CPU: without an option its cache is quantized",
    ),
    Peer(
        name="llama_cpp",
        title="llama.cpp",
        module="llama_engine",
        modules=("llama_cpp", "gguf"),
        distributions=("llama-cpp-python", "gguf"),
        install="--no-deps llama-cpp-python==0.3.36 diskcache gguf",
        formats={"f16": "float", "q8_0": "8 bit", "q4_0": "4 bit"},
        weights="float16 (a GGUF made of the checkpoint)",
        prefill="batches of 2,048 tokens, micro-batches of 512",
        note="flash attention on, which quantized values need",
    ),
    Peer(
        name="transformers",
        title="transformers' caches",
        module="hf_engine",
        modules=("torch", "transformers", "hqq", "optimum.quanto"),
        distributions=("transformers", "torch", "optimum-quanto", "hqq"),
        install="",
        formats={
            "dynamic": "float",
            "hqq_int8": "8 bit",
            "quanto_int4": "4 bit",
            "hqq_int4": "4 bit",
            "quanto_int2": "4 bit",
        },
        weights="float32",
        prefill="whole prompt at once, logits of the last token only",
        note="the last up to 127 tokens stay in float32, and no requantization falls into the timed steps: quality and speed "
        "are better than over a longer answer",
    ),
)


def peer_named(name: str) -> Peer:
    """Return a peer. Raises KeyError for an unknown name."""
    return {peer.name: peer for peer in PEERS}[name]
