"""A toy with a cache: its logits are a decaying sum over the tokens before and the token itself, all read back from codes."""

import json
import os
import signal
import time
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

import vllm

DECAY, LOUDNESS, HEADS, WIDTH, VOCABULARY = 0.8, 6.0, 2, 64, 1344


class Tensor(np.ndarray):  # type: ignore[type-arg]
    """As much of torch.Tensor as the worker and its processor need."""

    @property
    def device(self) -> Any:
        return SimpleNamespace(type="cpu")

    def fill_(self, value: float) -> None:
        self.fill(value)

    def detach(self) -> "Tensor":
        return self

    def float(self) -> "Tensor":
        return self.astype(np.float32)

    def cpu(self) -> "Tensor":
        return self

    def numpy(self) -> Any:
        return np.asarray(self)

    def numel(self) -> int:
        return self.size

    def element_size(self) -> int:
        return self.itemsize


class SamplingParams:
    def __init__(
        self,
        *,
        temperature: float,
        max_tokens: int,
        ignore_eos: bool,
        detokenize: bool,
        logprobs: Any = None,
        extra_args: Any = None,
    ) -> None:
        assert (temperature, ignore_eos, detokenize) == (0.0, True, False)
        self.max_tokens, self.logprobs, self.extra_args = max_tokens, logprobs, extra_args


class LLM:
    def __init__(self, model: str, logits_processors: Any, **given: Any) -> None:
        if vllm.MODE == "crash while loading":
            os.kill(os.getpid(), signal.SIGABRT)
        if vllm.MODE == "hang while loading":
            time.sleep(600)
        if vllm.MODE == "no memory":
            raise RuntimeError("No available memory for the cache blocks.\nTry increasing kv_cache_memory_bytes")
        assert not given["trust_remote_code"]
        assert not given["async_scheduling"]
        self.llm_engine = Engine(Path(model), given, logits_processors[0]())


class Engine:
    def __init__(self, model: Path, given: dict[str, Any], processor: Any) -> None:
        self.processor, self.cached = processor, given["enable_prefix_caching"]
        quantized = given["kv_cache_dtype"].startswith("fp8")
        scales = self._scales(model) if quantized else [(1.0, 1.0)] * 4
        rng = np.random.default_rng(0)
        vectors = rng.normal(size=(VOCABULARY, WIDTH)).astype(np.float32)
        self.vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        self.read = rounded(self.vectors / scales[0][0]) * scales[0][0] if quantized else self.vectors
        self.requests: dict[str, Any] = {}
        layers = {}
        for number, (key, value) in enumerate(scales):
            name = f"model.layers.{number}.self_attn.attn"
            layers[name] = Layer(given["kv_cache_dtype"], given["block_size"], key, value)
        self.layers = layers
        context = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
        runner = SimpleNamespace(vllm_config=context)
        manager = SimpleNamespace(free=lambda _: None, get_block_ids=lambda _: ([0],), block_pool=Pool())
        core = SimpleNamespace(
            model_executor=Executor(SimpleNamespace(model_runner=runner)),
            scheduler=SimpleNamespace(kv_cache_manager=manager),
            vllm_config=SimpleNamespace(
                cache_config=SimpleNamespace(block_size=given["block_size"]),
                model_config=SimpleNamespace(get_total_num_kv_heads=lambda: HEADS),
                parallel_config=SimpleNamespace(tensor_parallel_size=given["tensor_parallel_size"]),
            ),
        )
        self.manager = manager
        self.engine_core = SimpleNamespace(engine_core=core)

    def _scales(self, model: Path) -> list[tuple[float, float]]:
        """Those of the checkpoint, if its config.json says that there are any; else 1.0, without a word."""
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        file = model / "kv_scales.safetensors"
        if "quantization_config" not in config or not file.is_file() or vllm.MODE == "scales ignored":
            return [(1.0, 1.0)] * 4
        data = file.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        numbers = {}
        for name, entry in header.items():
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            numbers[name] = float(np.frombuffer(data[begin:end], "<f4")[0])
        found = [tuple(numbers[f"model.layers.{layer}.self_attn.{side}_scale"] for side in "kv") for layer in range(4)]
        return [(v, k) for k, v in found] if vllm.MODE == "scales swapped" else found  # type: ignore[misc]

    def add_request(self, name: str, prompt: Any, params: SamplingParams) -> None:
        if vllm.MODE == "hang while generating":
            time.sleep(600)
        if vllm.MODE == "dies while generating":
            os.kill(os.getpid(), signal.SIGKILL)
        self.requests[name] = SimpleNamespace(
            prompt=list(prompt["prompt_token_ids"]),
            params=params,
            output=[],
            logprobs=[],
            internal=f"{name}-{uuid.uuid4().hex[:8]}",
            processor=self.processor.new_req_logits_processor(params),
        )

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def step(self) -> list[Any]:
        outputs = []
        for name, request in list(self.requests.items()):
            row = self._row([*request.prompt, *request.output])
            said = row - row.max() - np.log(np.exp(row - row.max()).sum())
            if vllm.MODE == "shifted logits":
                said = np.roll(said, 1)
            chosen = row.astype(np.float32).view(Tensor)
            if request.processor is not None:
                chosen = request.processor(request.output, chosen)
            token = int(np.argmax(chosen))
            request.output.append(token)
            request.logprobs.append({token: SimpleNamespace(logprob=float(said[token]))})
            finished = len(request.output) == request.params.max_tokens
            completion = SimpleNamespace(token_ids=list(request.output), logprobs=request.logprobs)
            metrics = SimpleNamespace(first_token_latency=1e-3)
            outputs.append(
                SimpleNamespace(request_id=name, finished=finished, outputs=[completion], metrics=metrics, num_cached_tokens=0)
            )
            if finished:
                self.manager.free(SimpleNamespace(request_id=request.internal, num_preemptions=0))
                del self.requests[name]
        return outputs

    def _row(self, tokens: list[int]) -> Any:
        first = next(iter(self.layers.values()))
        gain = first.impl.gain
        state = np.zeros(WIDTH, np.float32)
        for token in tokens:
            state = DECAY * state + self.read[token] * gain
        return LOUDNESS * self.vectors @ state


class Executor:
    """Of one worker, in this process."""

    def __init__(self, worker: Any) -> None:
        self.worker = worker

    def collective_rpc(self, function: Any, args: Any = ()) -> list[Any]:
        return [function(self.worker, *args)]


class Layer:
    def __init__(self, dtype: str, block_size: int, key: float, value: float) -> None:
        self.kv_cache_dtype, self.isa = dtype, "amx"
        self._k_scale_float, self._v_scale_float = key, value
        self._k_scale, self._v_scale = (np.array([scale], np.float32).view(Tensor) for scale in (key, value))
        kind = np.uint8 if dtype.startswith("fp8") else np.float16
        self.kv_cache = np.zeros((4, HEADS, block_size, 2 * WIDTH), kind).view(Tensor)
        self.impl = Impl()


class Impl:
    """Its `do_kv_cache_update` is replaced by the must-fail control; how the toy notices."""

    gain = 1.0

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "do_kv_cache_update":
            object.__setattr__(self, "gain", 0.1)
        object.__setattr__(self, name, value)

    def do_kv_cache_update(self, *_: Any) -> None:
        raise AssertionError("the toy stores nothing")


class Pool:
    num_gpu_blocks = 4

    def get_num_free_blocks(self) -> int:
        return 1


def rounded(x: Any) -> Any:
    """E4M3 codes as numbers."""
    mantissa, exponent = np.frexp(x)
    return np.clip(np.ldexp(np.round(mantissa * 16) / 16, exponent), -448, 448)
