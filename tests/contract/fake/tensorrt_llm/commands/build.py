"""A fake trtllm-build: accepts the recorded flags, applies the recorded rewrites, and writes engines that the toy loads."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import tensorrt_llm
import torch
from safetensors.numpy import load_file
from tensorrt_llm.facts import ENGINE, MODE, parse, rewrite


def weights_of(path: Path) -> dict[str, Any]:
    """Stand-in for preprocess_weights and load: add the cache's scale and its reciprocal."""
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith(".k_cache_scaling_factor")]:
        value = tensors.pop(name.replace(".k_cache", ".v_cache"))
        tensors[name.replace(".k_cache", ".kv_cache")] = np.maximum(tensors.pop(name), value)
    for name in [name for name in tensors if name.endswith(".kv_cache_scaling_factor")]:
        tensors.setdefault(name.replace("scaling_factor", "rcp_scaling_factor"), 1.0 / tensors[name])
    return tensors


def main() -> None:
    flags = parse(sys.argv[1:])
    if MODE == "hang while building":
        subprocess.Popen(["sleep", "600"])
        time.sleep(600)
    if MODE == "crash while building":
        os.kill(os.getpid(), signal.SIGSEGV)
    if MODE == "no memory while building":
        sys.exit("[TRT] [E] OutOfMemory: requested 12884901888 bytes")
    source, out = Path(flags["checkpoint_dir"]), Path(flags["output_dir"])
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    unknown = set(config["quantization"]) - set(ENGINE["quantization"]["keys"])
    if unknown:
        raise TypeError(f"QuantConfig.__init__() got an unexpected keyword argument {unknown}")
    build = {**ENGINE["build_config"], **{key: flags[key] for key in ENGINE["build_config"] if key in flags}}
    plugin = {key: flags.get(key, default) for key, default in ENGINE["plugin_config"].items()}
    plugin = {key: {"enable": True, "disable": False}.get(str(value), value) for key, value in plugin.items()}
    major, minor = torch.cuda.get_device_capability(0)
    algorithms = {key: config["quantization"].get(key) for key in ("quant_algo", "kv_cache_quant_algo")}
    state = {**build, **plugin, **algorithms, "sm": 10 * major + minor}
    rewrite(state)
    build, plugin = {key: state[key] for key in build}, {key: state[key] for key in plugin}
    if MODE == "cache left out":
        config["quantization"]["kv_cache_quant_algo"] = None
    build |= {"plugin_config": plugin, "kv_cache_type": str(build["kv_cache_type"]).upper()}
    config["logits_dtype"] = flags["logits_dtype"]
    out.mkdir(parents=True)
    for rank in range(config["mapping"]["tp_size"]):
        tensors = weights_of(source / f"rank{rank}.safetensors")
        scale = tensors.get("transformer.layers.0.attention.kv_cache_scaling_factor", np.ones(1))
        rcp = tensors.get("transformer.layers.0.attention.kv_cache_rcp_scaling_factor", np.ones(1))
        embedding = np.float32(tensors["transformer.vocab_embedding.weight"])
        with (out / f"rank{rank}.engine").open("wb") as stream:
            np.savez(stream, embedding=embedding, scale=scale[0], rcp=rcp[0])
    engine_config = {"version": tensorrt_llm.__version__, "pretrained_config": config, "build_config": build}
    (out / "config.json").write_text(json.dumps(engine_config, indent=4), encoding="utf-8")


if __name__ == "__main__":
    main()
