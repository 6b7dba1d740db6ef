"""Runs in SGLang's interpreter and answers the requests of `kvgate_channel`.

Needs only SGLang and its dependencies (numpy, torch). Checked against release 0.5.23. `make test-sglang-source` runs it with
that release's Python code on a CPU, with stubs for compiled parts. The worker was never run with CUDA kernels.
"""

import itertools
import time
from functools import partial
from typing import Any

import kvgate_channel
import kvgate_rows


def validate(model: str, server_args: dict[str, Any]) -> dict[str, Any]:
    """Return server arguments as the release resolves them for this model and this machine.

    SGLang cannot resolve arguments without a GPU. In that case only their names are checked.
    """
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.utils import get_device

    arguments = ServerArgs(model_path=model, **server_args)
    try:
        get_device()
    except RuntimeError:
        return {"arguments": {}}
    arguments.resolve_once()
    resolved = arguments.resolved_dict()
    return {"arguments": {name: resolved[name] for name in server_args}}


class SglangModel:
    def __init__(self, model: str, server_args: dict[str, Any]) -> None:
        import sglang

        run = partial(kvgate_rows.run, generate=self.generate)
        self.operations: kvgate_channel.Operations = {"run": run, "load": self.load}
        self.engine = sglang.Engine(model_path=model, **server_args)
        expected = server_args["kv_cache_dtype"]
        cache = self.engine.get_server_info().get("kv_cache_dtype", expected)
        if expected not in ("auto", cache):
            raise RuntimeError(f"SGLang uses a cache of type {cache} instead of {expected}")

    def generate(self, prompts: list[list[int]], requests: list[dict[str, Any]], paths: list[str]) -> list[Any]:
        """Return each request's tokens, and write its rows to its file."""
        import kvgate_sglang_forcing as forcing

        # SGLang computes its own log-probabilities after the processor, so they cannot verify the recorded rows.
        outputs = self.engine.generate(
            input_ids=prompts,
            sampling_params=[
                {**_greedy_params(request["tokens"]), "custom_params": {forcing.REQUEST: request, forcing.ROWS: path}}
                for request, path in zip(requests, paths, strict=True)
            ],
            custom_logit_processor=forcing.SglangForcedTokens.to_str(),
        )
        return [output["output_ids"] for output in outputs]

    def load(self, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        """Return first-token times, measured one prompt at a time, and step times with all prompts decoding together."""
        first = []
        for prompt in prompts:
            began = time.perf_counter()
            self.engine.generate(input_ids=[prompt], sampling_params=[_greedy_params(1)])
            first.append((time.perf_counter() - began) * 1e3)
        arrived = [0] * len(prompts)
        times: list[float] = []
        stream = self.engine.generate(input_ids=prompts, sampling_params=[_greedy_params(tokens)] * len(prompts), stream=True)
        for chunk in stream:
            arrived[chunk["index"]] = chunk["meta_info"]["completion_tokens"]
            while len(times) < min(arrived):
                times.append(time.perf_counter())
        if len(times) < tokens:
            raise RuntimeError(f"only {len(times)} of {tokens} steps decoded all {len(prompts)} prompts together")
        return {"first_token_ms": first, "step_ms": [(late - early) * 1e3 for early, late in itertools.pairwise(times)]}


def _greedy_params(tokens: int) -> dict[str, Any]:
    return {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}


if __name__ == "__main__":
    kvgate_channel.serve({"describe": partial(kvgate_rows.describe, "sglang"), "validate": validate}, SglangModel)
