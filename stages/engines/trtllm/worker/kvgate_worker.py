"""Runs in TensorRT-LLM's interpreter and answers the requests of `kvgate_channel`.

Needs only TensorRT-LLM and its dependencies (numpy, torch). Checked against releases 1.2 to 1.4; tests/contract/facts/ records
the names used here.
"""

import asyncio
import copy
import importlib
import itertools
import subprocess
import sys
import time
import uuid
from functools import partial
from typing import Any

import kvgate_channel
import kvgate_forcing
import kvgate_rows

ATTENTION = ("tensorrt_llm._torch.attention_backend.trtllm", "tensorrt_llm._torch.attention.backends.trtllm")
"""Modules with the PyTorch runtime's attention, in releases from 1.3 on; the older name first."""
SWITCHES = (
    "enable_in_graph_sampling",
    "enable_low_latency_host_dispatch",
    "enable_early_first_token_response",
    "use_kv_cache_manager_v2",
)
"""Switches that change where logits are computed or pages are managed. Some releases lack them, and defaults may change."""
BUILD_MODULE = "tensorrt_llm.commands.build"
"""The module that `trtllm-build` runs."""


def build(flags: list[str]) -> dict[str, Any]:
    """Run trtllm-build with its output on stderr. Raises RuntimeError if it fails."""
    completed = subprocess.run([sys.executable, "-m", BUILD_MODULE, *flags], check=False, stdin=subprocess.DEVNULL, stdout=2)
    if completed.returncode != 0:
        raise RuntimeError(f"trtllm-build ended with {completed.returncode}")
    return {}


def validate(model: str, llm_args: dict[str, Any]) -> dict[str, Any]:
    """Parse LLM arguments and the checkpoint's quantization as the release's own LLM class does before loading weights."""
    from tensorrt_llm.llmapi.llm_args import KvCacheConfig, TorchLlmArgs, update_llm_args_with_extra_dict
    from tensorrt_llm.llmapi.llm_utils import ModelLoader

    cache = {**llm_args["kv_cache_config"], **_disabled_switches(KvCacheConfig)}
    pinned = {**llm_args, **_disabled_switches(TorchLlmArgs), "kv_cache_config": cache}
    try:  # like trtllm-serve
        parsed = TorchLlmArgs(**update_llm_args_with_extra_dict({"model": model}, copy.deepcopy(pinned)))
    except ValueError as error:
        raise ValueError(_first_problem(error)) from error
    arguments = parsed.model_dump(mode="json")
    refused = ""
    try:
        ModelLoader(parsed)._update_from_hf_quant_config()
    except Exception as error:
        refused = f"{type(error).__name__}: {error}"
    quantization = {name: getattr(parsed.quant_config, name) for name in ("quant_algo", "kv_cache_quant_algo")}
    return {"arguments": arguments, "pinned": pinned, "quantization": quantization, "refused": refused}


def _first_problem(error: ValueError) -> str:
    """Return the first problem of a pydantic error with class and field. For a union the error lists every alternative."""
    if not hasattr(error, "errors"):
        return str(error)
    problem = error.errors()[0]
    return f"{'.'.join(map(str, (error.title, *problem['loc'])))}: {problem['msg']}"  # type: ignore[attr-defined]


def _disabled_switches(kind: Any) -> dict[str, bool]:
    return {name: False for name in SWITCHES if name in kind.model_fields}


class TrtllmModel:
    def __init__(self, target: str, model: str, llm_args: dict[str, Any], key_fault: float) -> None:
        run = partial(kvgate_rows.run, generate=self.generate)
        self.salts = target == "pytorch"
        self.operations: kvgate_channel.Operations = {"run": run, "load": self.load}
        if target == "engine":
            self.llm = importlib.import_module("tensorrt_llm._tensorrt_engine").LLM(model=model, **llm_args)
            return
        faulted = [] if key_fault == 1.0 else _corrupt_attention(key_fault)
        self.llm = importlib.import_module("tensorrt_llm").LLM(model=model, **llm_args)
        if key_fault != 1.0 and not faulted:
            raise RuntimeError("the fault reached no attention layer: this release stores the cache's scale elsewhere")

    def generate(self, prompts: list[list[int]], requests: list[dict[str, Any]], paths: list[str]) -> list[Any]:
        """Return each request's tokens, and write its rows to its file."""
        sampling = [
            _greedy_params(request["tokens"], logits_processor=kvgate_forcing.ForcedTokens(request, path))
            for request, path in zip(requests, paths, strict=True)
        ]
        salt = {"cache_salt": [_salt() for _ in prompts]} if self.salts else {}
        outputs = self.llm.generate(prompts, sampling, use_tqdm=False, **salt)
        kvgate_forcing.refuse_more_calls(requests, paths)
        return [output.outputs[0].token_ids for output in outputs]

    def load(self, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        """Return each prompt's first-token time, measured one by one, and the times of `tokens - 1` steps over all prompts."""
        return asyncio.run(self._load(prompts, tokens))

    async def _load(self, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        first = []
        for prompt in prompts:
            started = time.perf_counter()
            await self._arrivals(prompt, 1)
            first.append((time.perf_counter() - started) * 1e3)
        arrivals = await asyncio.gather(*(self._arrivals(prompt, tokens) for prompt in prompts))
        last = [max(step) for step in zip(*arrivals, strict=True)]  # a step ends with its slowest sequence
        return {"first_token_ms": first, "step_ms": [(b - a) * 1e3 for a, b in itertools.pairwise(last)]}

    async def _arrivals(self, prompt: list[int], tokens: int) -> list[float]:
        times: list[float] = []
        salt = {"cache_salt": _salt()} if self.salts else {}
        async for output in self.llm.generate_async(prompt, _greedy_params(tokens), streaming=True, **salt):
            arrived = len(output.outputs[0].token_ids) - len(times)
            times += [time.perf_counter()] * arrived
        if len(times) != tokens:
            raise RuntimeError(f"requested {tokens} tokens, but {len(times)} arrived")
        return times


def _salt() -> str:
    """Return a unique salt: block reuse stays on as in serving, but no request reuses blocks of another request."""
    return uuid.uuid4().hex


def _greedy_params(tokens: int, **extra: Any) -> Any:
    from tensorrt_llm import SamplingParams

    return SamplingParams(max_tokens=tokens, end_id=-1, top_k=1, ignore_eos=True, detokenize=False, **extra)


def _attention_module() -> Any:
    """Return the module of the PyTorch runtime's attention. Raises RuntimeError if no module of ATTENTION exists."""
    for name in ATTENTION:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not name.startswith(error.name):
                raise  # the module exists but fails to import a dependency
    raise RuntimeError(
        f"this release has none of {', '.join(ATTENTION)}: the must-fail control cannot reach its attention layers"
    )


def _corrupt_attention(factor: float) -> list[object]:
    """Multiply the scale that decodes the cache in attention layers by `factor`; return a list that receives every new layer.

    In the PyTorch runtime every attention layer has a scale to encode and one to decode; neither is read from the checkpoint.
    """
    kind = _attention_module().TrtllmAttention
    original, faulted = kind.__init__, []

    def corrupted(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.kv_scale_quant_orig = self.kv_scale_quant_orig * factor
        faulted.append(self)

    kind.__init__ = corrupted
    return faulted


if __name__ == "__main__":
    describe = partial(kvgate_rows.describe, "tensorrt_llm")
    kvgate_channel.serve({"describe": describe, "build": build, "validate": validate}, TrtllmModel)
