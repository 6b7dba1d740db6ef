"""A toy engine that takes only recorded arguments. Logits depend on the last tokens and on the size of the key weights."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

import sglang
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor
from sglang.srt.server_args import FACTS, ServerArgs

VOCABULARY = 1344


class Engine:
    def __init__(self, **kwargs: Any) -> None:
        ServerArgs(**kwargs)
        assert kwargs["kv_cache_dtype"] in FACTS["kv_cache_dtype"]
        self.args = kwargs
        with safe_open(Path(kwargs["model_path"]) / "model.safetensors", "np") as weights:
            keys = weights.get_tensor("model.layers.0.self_attn.k_proj.weight")
        self.keys = float(np.abs(keys.astype(np.float32)).mean())

    def get_server_info(self) -> dict[str, Any]:
        dtype = "auto" if sglang.MODE == "other cache" else self.args["kv_cache_dtype"]
        return {**self.args, "kv_cache_dtype": dtype, "version": sglang.__version__}

    def generate(
        self,
        prompt: Any = None,
        sampling_params: Any = None,
        input_ids: Any = None,
        stream: bool = False,
        custom_logit_processor: str | None = None,
        **ignored: Any,
    ) -> Any:
        assert prompt is None
        assert not ignored
        for params in sampling_params:
            assert params.keys() <= set(FACTS["SamplingParams"])
        if custom_logit_processor is not None and not self.args.get("enable_custom_logit_processor"):
            raise ValueError("The server is not configured to enable custom logit processor.")
        chunks = self._steps(input_ids, sampling_params, custom_logit_processor)
        if stream:
            return chunks
        last = {chunk["index"]: chunk for chunk in chunks}
        return [{key: value for key, value in last[i].items() if key != "index"} for i in range(len(input_ids))]

    def _steps(self, prompts: Any, params: Any, serialized: str | None) -> Any:
        """Decode all requests together, one token per step. The processor sees only unfinished requests."""
        requests = [SimpleNamespace(origin_input_ids=prompt, output_ids=[]) for prompt in prompts]
        live = list(range(len(requests)))
        while live:
            rows = [self._logits([*requests[i].origin_input_ids, *requests[i].output_ids]) for i in live]
            logits = np.array(rows, np.float32).view(torch.Tensor)
            if serialized is not None and not (sglang.MODE == "skips a step" and len(requests[live[0]].output_ids) == 2):
                custom_params = [params[i]["custom_params"] | {"__req__": requests[i]} for i in live]
                logits = CustomLogitProcessor.from_str(serialized)(logits, custom_params)
            for i, token in zip(live, logits.argmax(-1).tolist(), strict=True):
                requests[i].output_ids.append(token)
                count = len(requests[i].output_ids)
                yield {"index": i, "output_ids": list(requests[i].output_ids), "meta_info": {"completion_tokens": count}}
            live = [i for i in live if len(requests[i].output_ids) < params[i]["max_new_tokens"]]

    def _logits(self, history: list[int]) -> Any:
        rng = np.random.default_rng(history[-4:])
        row = rng.normal(size=VOCABULARY, scale=3.0) * 20.0 * self.keys
        if self.args["kv_cache_dtype"].startswith("fp8"):
            row += np.random.default_rng([7, *history[-4:]]).normal(size=VOCABULARY, scale=0.02)
        return row
