"""Runs in vLLM's interpreter and answers the requests of `kvgate_channel`.

Needs only vLLM and its dependencies (numpy, torch). Written from the sources of `CHECKED_RELEASES` in
stages/engines/vllm/backend.py. The engine runs in this process (VLLM_ENABLE_V1_MULTIPROCESSING=0), so that each step can be
observed. Tensor parallelism runs its workers in other processes.
"""

import itertools
import os
import tempfile
import time
import typing
from pathlib import Path
from typing import Any

import kvgate_channel
import kvgate_rows
import kvgate_vllm_cache


def describe() -> dict[str, Any]:
    """Return the installed release, the platform, and the cache types that the release and this machine support."""
    from vllm.config.cache import CacheDType
    from vllm.platforms import current_platform

    names = list(typing.get_args(CacheDType))
    platform = "cpu" if current_platform.is_cpu() else "cuda" if current_platform.is_cuda() else current_platform.device_type
    refused = {name: reason for name in names if (reason := kvgate_vllm_cache.refusal(platform, name))}
    described: dict[str, Any] = kvgate_rows.describe("vllm", platform=platform, cache_dtypes=names, refused=refused)
    return described


def validate(model: str, engine_args: dict[str, Any]) -> dict[str, Any]:
    """Return engine arguments as the release resolves them for this model and this machine."""
    from vllm.engine.arg_utils import EngineArgs

    config = EngineArgs(model=model, **engine_args).create_engine_config()
    resolved = {
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "kv_cache_dtype": config.cache_config.cache_dtype,
        "kv_cache_dtype_skip_layers": config.cache_config.kv_cache_dtype_skip_layers,
        "block_size": config.cache_config.block_size,
        "max_model_len": config.model_config.max_model_len,
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "enable_chunked_prefill": config.scheduler_config.enable_chunked_prefill,
        "enable_prefix_caching": config.cache_config.enable_prefix_caching,
        "tensor_parallel_size": config.parallel_config.tensor_parallel_size,
        "trust_remote_code": config.model_config.trust_remote_code,
    }
    return {"arguments": resolved}


class VllmModel:
    def __init__(self, model: str, engine_args: dict[str, Any], key_fault: float) -> None:
        from kvgate_vllm_forcing import VllmForcedTokens
        from vllm import LLM

        self.operations: kvgate_channel.Operations = {"run": self.run, "load": self.load}
        workers = engine_args["tensor_parallel_size"]
        if workers > 1:
            # The workers' sockets and rendezvous file are removed together with this process's folder.
            tempfile.tempdir = os.environ["VLLM_RPC_BASE_PATH"] = os.getcwd()
        self.llm = LLM(model=model, logits_processors=[VllmForcedTokens], **engine_args)
        self.engine = self.llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        if workers > 1:
            self._exit_with_workers()
        self.cache = kvgate_vllm_cache.Cache(self.core)
        self.operations["facts"] = self.cache.facts
        if key_fault != 1.0:
            self.cache.corrupt_keys(key_fault)
        self.count = itertools.count()

    def _exit_with_workers(self) -> None:
        """Exit as soon as a worker dies, because requests would hang. Also unlink vLLM's shared memory."""
        executor = self.core.model_executor
        shutdown = executor.shutdown
        executor.shutdown = lambda: os._exit(1) if executor.is_failed else shutdown()
        kvgate_channel.forget_shared(os.getpgid(0))

    def run(self, requests: list[dict[str, Any]], folder: str, show: bool = False) -> dict[str, Any]:
        """Answer `run` of `kvgate_channel`. With `show`, write each request's cached bytes to the file `stored`."""
        from kvgate_vllm_forcing import KEY

        places = {}
        for i, request in enumerate(requests):
            needed = {part: request[part] for part in ("forced", "tokens", "skip")}
            recorded = {KEY: {"request": needed, "path": str(Path(folder, f"logits-{i}"))}}
            places[self._add(request["prompt"], request["tokens"], logprobs=0, extra_args=recorded)] = i
        answers: list[dict[str, Any]] = [{} for _ in requests]
        for name, output, (blocks, preempted) in self._finished():
            i = places[name]
            answers[i] = _answer(requests[i], str(Path(folder, f"logits-{i}")), output)
            answers[i] |= {"preempted": preempted, "reused": output.num_cached_tokens or 0, "blocks": blocks}
            if show:
                stored = Path(folder, f"stored-{i}")
                length = len(requests[i]["prompt"]) + requests[i]["tokens"] - 1
                answers[i]["stored"] = str(stored) if self.cache.write(blocks, length, stored) else ""
        return {"answers": answers}

    def _add(self, prompt: list[int], tokens: int, **extra: Any) -> str:
        from vllm import SamplingParams

        name = f"kvgate-{next(self.count)}"
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, **extra)
        self.engine.add_request(name, {"prompt_token_ids": prompt}, params)
        return name

    def _finished(self) -> Any:
        """Step until all requests have finished; yield (name, output, (blocks, preemptions)) before the blocks are reused."""
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                if output.finished:
                    yield output.request_id, output, self.cache.freed.pop(output.request_id, ([], 0))

    def load(self, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        """Return the first-token time of each prompt, and the times of `tokens - 1` joint steps.

        First-token times are vLLM's own, one prompt at a time.
        """
        first = []
        for prompt in prompts:
            self._add(prompt, 1)
            (output,) = [output for _, output, _ in self._finished()]
            first.append(output.metrics.first_token_latency * 1e3)
        for prompt in prompts:
            # Early prompts decode while later ones are prefilled. With the extra tokens all decode together long enough.
            self._add(prompt, tokens + len(prompts))
        steps, arrived, began = [], 0, time.perf_counter()
        while self.engine.has_unfinished_requests():
            outputs = self.engine.step()
            now = time.perf_counter()
            counts = [len(output.outputs[0].token_ids) for output in outputs]
            if len(counts) == len(prompts) and min(counts) > arrived > 0:
                steps.append((now - began) * 1e3)
            arrived, began = (min(counts), now) if len(counts) == len(prompts) else (0, now)
        if len(steps) < tokens - 1:
            raise RuntimeError(f"only {len(steps)} of {tokens - 1} steps decoded all {len(prompts)} prompts together")
        return {"first_token_ms": first, "step_ms": steps[-(tokens - 1) :]}


def _answer(request: dict[str, Any], path: str, output: Any) -> dict[str, Any]:
    """Return the answer to a request.

    Raises RuntimeError if a forced token was not chosen, or if a row is of another step: its log-probability of the token must
    equal the raw log-probability that vLLM reports.
    """
    import numpy as np

    completion = output.outputs[0]
    answer: dict[str, Any] = kvgate_rows.check_answer(path, request, completion.token_ids)
    rows = np.memmap(path, "<f4", "r", shape=tuple(answer["shape"]))
    for step, row in enumerate(rows.astype(np.float64), start=request["skip"]):
        if not np.isfinite(row).all():
            continue  # the caller counts rows that are not finite
        token, high = answer["tokens"][step], row.max()
        computed, reported = row[token] - high - np.log(np.exp(row - high).sum()), completion.logprobs[step][token].logprob
        if abs(computed - reported) > 1e-2:
            raise RuntimeError(f"step {step}: token {token} has log-probability {reported}, but {computed} in its row")
    return answer


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    kvgate_channel.serve({"describe": describe, "validate": validate}, VllmModel)
