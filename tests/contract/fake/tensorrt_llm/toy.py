"""A toy model with an FP8 or INT8 cache. Logits are products of all vectors with a decaying sum of the earlier vectors.

The vectors are the checkpoint's embedding. Like in TensorRT-LLM, prefill sees exact vectors, and decoding sees cached
values. So the format or a wrong scale changes only decoded logits. With block reuse, prefill sees cached values too.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tensorrt_llm.facts import ENGINE, MODE, only

DECAY, LOUDNESS = 0.8, 6.0


class SamplingParams:
    def __init__(self, **arguments: Any) -> None:
        only(ENGINE["sampling_params"], arguments, "SamplingParams")
        assert arguments["ignore_eos"]
        assert arguments["end_id"] == -1, "without an end token it asks the tokenizer"
        self.max_tokens: int = arguments["max_tokens"]
        self.processor = arguments.get("logits_processor")


def request_output(token_ids: list[int]) -> SimpleNamespace:
    return SimpleNamespace(outputs=[SimpleNamespace(token_ids=token_ids)])


class Toy:
    """A toy model with an FP8, INT8 or exact cache (`algorithm`).

    `to_codes` and `from_codes` are the cache's two scales. A prompt is computed in `chunks` chunks.
    """

    def __init__(
        self,
        embedding: Any,
        algorithm: str | None,
        to_codes: float,
        from_codes: float,
        prompts_read: bool = False,
        chunks: int = 1,
    ) -> None:
        self.prompts_read, self.chunks = prompts_read, chunks
        self.vectors = embedding / np.linalg.norm(embedding, axis=1, keepdims=True)
        codes = rounded(self.vectors * to_codes, algorithm)
        self.read = codes * from_codes if algorithm else self.vectors.astype(np.float16).astype(np.float32)

    def generate(self, prompt: Sequence[int], params: SamplingParams) -> list[int]:
        state = np.zeros(self.vectors.shape[1], np.float32)
        for token in prompt[:-1]:
            state = DECAY * (state + (self.read if self.prompts_read else self.vectors)[token])
        fresh = state + self.vectors[prompt[-1]]
        tokens = [prompt[-1]]
        state *= 0
        for token in prompt[:-1]:
            state = DECAY * (state + self.read[token])
        for step in range(params.max_tokens):
            visible = fresh if step == 0 else state + self.vectors[tokens[-1]]
            row = (LOUDNESS * self.vectors @ visible).astype(np.float32).view(torch.Tensor)
            for _ in range(self.chunks if step == 0 else 1) if params.processor is not None else ():
                processor_arguments = (1, row[None, None], [[*prompt, *tokens[1:]]], None, None)
                params.processor(**dict(zip(ENGINE["logits_processor"], processor_arguments, strict=True)))
            state = DECAY * (state + self.read[tokens[-1]])
            tokens.append(int(row.argmax()))
        return tokens[1:]


class Runtime:
    """The answering part shared by the two LLM classes."""

    toy: Toy

    def __init__(self) -> None:
        self.salts: set[str] = set()
        """Salts of earlier requests. With block reuse, a request with an equal salt would find their blocks."""

    def _refuse_salt(self, salt: str | None) -> None:
        if self.toy.prompts_read and (salt is None or salt in self.salts):
            raise RuntimeError("a request would find another's blocks")
        self.salts.add(str(salt))

    def generate(
        self,
        inputs: Any,
        sampling_params: Any,
        use_tqdm: bool,  # noqa: ARG002
        cache_salt: Sequence[str] = (),
    ) -> list[SimpleNamespace]:
        for number in range(len(inputs)):
            self._refuse_salt(cache_salt[number] if cache_salt else None)
        if MODE == "hang while generating":
            time.sleep(600)
        pairs = zip(inputs, sampling_params, strict=True)
        return [request_output(self.toy.generate(prompt, params)) for prompt, params in pairs]

    async def generate_async(
        self, inputs: Any, sampling_params: Any, streaming: bool, cache_salt: str | None = None
    ) -> AsyncIterator[SimpleNamespace]:
        assert streaming
        self._refuse_salt(cache_salt)
        tokens = self.toy.generate(inputs, sampling_params)
        for end in range(1, len(tokens) + 1):
            await asyncio.sleep(1e-4)
            yield request_output(tokens[:end])


def rounded(x: Any, algorithm: str | None) -> Any:
    """Round to the values of the codes: 3 mantissa bits up to 448, or integers up to 127."""
    if algorithm == "INT8":
        return np.clip(np.round(x), -127, 127)
    mantissa, exponent = np.frexp(x)
    return np.clip(np.ldexp(np.round(mantissa * 16) / 16, exponent), -448, 448)
