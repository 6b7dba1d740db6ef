"""Detects a checkpoint's quantization by the recorded rules."""

import json
from pathlib import Path

from tensorrt_llm.facts import ENGINE, PYTORCH
from tensorrt_llm.llmapi.llm_args import TorchLlmArgs


class ModelLoader:
    def __init__(self, llm_args: TorchLlmArgs) -> None:
        self.llm_args = llm_args

    def _update_from_hf_quant_config(self) -> bool:
        facts, folder, quantization = PYTORCH["checkpoint"], Path(self.llm_args.model), self.llm_args.quant_config
        if (folder / "hf_quant_config.json").is_file():
            declared = json.loads((folder / "hf_quant_config.json").read_text(encoding="utf-8"))["quantization"]
            for key in facts["needed_in_hf_quant_config"]:
                if declared.get(key) is None:
                    raise ValueError(f"a quantized checkpoint needs {key}")
            if declared["quant_algo"] not in ENGINE["quantization"]["quant_algo"]:
                raise ValueError(f"{declared['quant_algo']!r} is no algorithm")
            quantization.quant_algo = declared["quant_algo"]
            quantization.kv_cache_quant_algo = declared.get("kv_cache_quant_algo") or quantization.kv_cache_quant_algo
            return True
        declaration = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("quantization_config")
        if declaration is not None and declaration.get("quant_method") not in facts["quant_methods_of_config"]:
            raise NotImplementedError(f"unsupported quantization_config: {declaration}")
        return declaration is not None
