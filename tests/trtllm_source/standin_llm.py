"""A stand-in for TensorRT-LLM's LLM class. Arguments, attention layers, sampling parameters and the logits hook are real."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tensorrt_llm._torch.attention_backend.trtllm import TrtllmAttention
from tensorrt_llm._torch.pyexecutor.model_engine import PyTorchModelEngine
from tensorrt_llm.llmapi.llm_args import TorchLlmArgs
from tensorrt_llm.llmapi.llm_utils import ModelLoader


class Request:
    """The part of a request that the hook reads."""

    def __init__(self, number: int, prompt: Sequence[int], processor: Any) -> None:
        self.tokens, self.py_orig_prompt_len, self.py_request_id = list(prompt), len(prompt), number
        self.py_logits_post_processors = [processor]

    def get_tokens(self, beam: int) -> list[int]:
        assert beam == 0
        return self.tokens


class LLM:
    def __init__(self, model: str, **arguments: Any) -> None:
        self.args = TorchLlmArgs(model=model, **arguments)
        ModelLoader(self.args)._update_from_hf_quant_config()
        config = json.loads(Path(model, "config.json").read_text(encoding="utf-8"))
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.vocabulary = config["vocab_size"]
        # With skip_create_weights_in_init, the constructor calls no compiled code.
        layers = [
            TrtllmAttention(layer, heads, config["head_dim"], kv_heads, skip_create_weights_in_init=True)
            for layer in range(config["num_hidden_layers"])
        ]
        self.scale = float(layers[0].kv_scale_quant_orig[0])

    def generate(self, inputs: Any, sampling_params: Any, use_tqdm: bool, cache_salt: list[str]) -> list[Any]:
        assert not use_tqdm
        assert len(set(cache_salt)) == len(inputs)
        hook = PyTorchModelEngine._execute_logit_post_processors
        engine = SimpleNamespace(mapping=SimpleNamespace(is_last_pp_rank=lambda: True))
        outputs = []
        for number, (prompt, params) in enumerate(zip(inputs, sampling_params, strict=True)):
            request = Request(number, prompt, params.logits_processor)
            for step in range(params.max_tokens):
                scheduled = SimpleNamespace(context_requests=[] if step else [request], all_requests=lambda: [request])  # noqa: B023
                logits = {"logits": self.logits(request.tokens)[None]}
                hook(engine, scheduled, logits)
                request.tokens.append(int(logits["logits"].argmax()))
            outputs.append(SimpleNamespace(outputs=[SimpleNamespace(token_ids=request.tokens[len(prompt) :])]))
        return outputs

    def logits(self, tokens: Sequence[int]) -> Any:
        """Return logits that depend on the tokens and on the scale for reading the cache."""
        return torch.sin(torch.arange(self.vocabulary) * 0.01 * len(tokens) + tokens[-1]) * self.scale
