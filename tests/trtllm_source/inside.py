"""Runs parts of TensorRT-LLM's own Python for the tests, in the interpreter with the stand-ins.

Reads a list of [operation, arguments] as JSON from stdin; writes the list of answers to the file given as its argument. An
answer is {"ok": ...} or {"error": TEXT}.
"""

import importlib
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import standins


def build(flags: list[str], sm: list[int]) -> dict[str, Any]:
    """Run trtllm-build's main() for a GPU, up to the optimised model, and return the engine's config.json."""
    standins.show_gpus((sm[0], sm[1]))
    command: Any = importlib.import_module("tensorrt_llm.commands.build")
    importlib.import_module("tensorrt_llm._utils").get_sm_version.cache_clear()
    sys.argv = ["trtllm-build", *flags]
    command.main()
    out = flags[flags.index("--output_dir") + 1]
    engine_config: dict[str, Any] = json.loads(Path(out, "config.json").read_text(encoding="utf-8"))
    return engine_config


def load(checkpoint: str) -> dict[str, Any]:
    """Load a checkpoint with from_checkpoint; return its cache scales."""
    models: Any = importlib.import_module("tensorrt_llm.models")
    config = models.PretrainedConfig.from_json_file(str(Path(checkpoint, "config.json")))
    config.set_rank(0)
    model = models.MODEL_MAP[config.architecture].from_checkpoint(checkpoint, config=config)
    attentions = [layer.attention for layer in model.transformer.layers]
    names = ("kv_cache_scaling_factor", "kv_cache_rcp_scaling_factor")
    return {
        name: [float(getattr(part, name).raw_value[0]) for part in attentions if getattr(part, name, None)] for name in names
    }


def configure(checkpoint: str, dtype: str) -> dict[str, Any]:
    """Read a checkpoint as the PyTorch runtime does first; return its algorithms and rotary embedding."""
    config: Any = importlib.import_module("tensorrt_llm._torch.model_config").ModelConfig.from_pretrained(checkpoint)
    loader: Any = importlib.import_module("tensorrt_llm._torch.pyexecutor.model_loader")
    loader.validate_and_set_kv_cache_quant(config, dtype)
    pretrained = config.pretrained_config
    return {
        "architecture": pretrained.architectures[0],
        "cache": config.quant_config.kv_cache_quant_algo,
        "weights": config.quant_config.quant_algo,
        "rope_theta": pretrained.rope_theta,
        "rope_scaling": pretrained.rope_scaling,
    }


def serve(bundle: str) -> dict[str, Any]:
    """Run trtllm-serve's command on a bundle up to the server; return the LLM arguments that the server would get."""
    standins.show_gpus(standins.SM)
    command: Any = importlib.import_module("tensorrt_llm.commands.serve")
    arguments: Any = importlib.import_module("tensorrt_llm.llmapi.llm_args").TorchLlmArgs
    captured: dict[str, Any] = {}
    command.launch_server = lambda *call: captured.update(call[2])  # host, port, LLM arguments
    command.parse_metadata_server_config_file = lambda *_: None
    command.main([f"{bundle}/checkpoint", "--config", f"{bundle}/llm_args.yaml"], standalone_mode=False)
    fields = {key: value for key, value in captured.items() if key in arguments.model_fields}
    parsed: dict[str, Any] = arguments(**{**fields, "skip_tokenizer_init": True}).model_dump(mode="json")
    return parsed


OPERATIONS: dict[str, Callable[..., dict[str, Any]]] = {"build": build, "configure": configure, "load": load, "serve": serve}


def main(out: Path) -> None:
    standins.stop_at_the_network()
    answers: list[dict[str, Any]] = []
    for operation, arguments in json.load(sys.stdin):
        try:
            answers.append({"ok": OPERATIONS[operation](**arguments)})
        except Exception as error:
            traceback.print_exc()
            answers.append({"error": f"{type(error).__name__}: {error}"})
    out.write_text(json.dumps(answers), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
