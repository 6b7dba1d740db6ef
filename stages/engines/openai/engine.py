"""A server over HTTP: one forced token a request, free answers, times."""

import math
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.core.errors import MissingRequirement, UserError, short
from pipeline.core.kv import POLICY_FILE, KVPolicy
from stages.engines.bundle import BundleRecord, open_record, read_record
from stages.engines.openai.client import Client, Refused
from stages.engines.openai.config import OpenAIConfig
from stages.engines.openai.protocol import FINGERPRINT, Completion, token_id

COMPLETIONS = "/v1/completions"
FORCE = 100.0
"""The largest bias of OpenAI's API: the token becomes the most likely one. Raw log-probabilities are those before it."""
MOST_PROBABILITY = 1.01
"""Of all tokens together, that are rounded to 16 bits at worst."""
ROUNDING = 1e-3
"""By which a log-probability may be above 0."""


class ServerRecord(BundleRecord):
    """`bundle.json` of a server: what it said of itself when it was recorded."""

    setting: str
    """The configuration's key that gives the url."""
    url: str
    model: str
    release: str
    says: dict[str, str]
    top_logprobs: int
    vocab_size: int


@dataclass(frozen=True)
class Shown:
    """What a server shows of one next-token distribution."""

    logp: Mapping[int, float]
    """Natural log-probabilities of its most likely tokens, and of the forced one."""
    prompt_tokens: int
    cached_tokens: int | None
    """Tokens of the prompt that came from the prefix cache; None where the server does not say."""


@dataclass(frozen=True)
class ServedTimes:
    """Times of one load, as a client sees them: queueing, HTTP and JSON are part of them."""

    first_token_ms: list[float]
    """Time to the first token of each prompt, asked alone, one after the other."""
    tokens_per_s: float | None
    """Decoded by all prompts together; None where too few came to tell."""


def load_engine(recorded: Path, config: OpenAIConfig) -> "OpenAIEngine":
    """Return the server that was recorded. Raises UserError when a file of its record is missing or was altered."""
    record = open_record(recorded, ServerRecord, config.name)
    client = Client(config, record.setting, record.url)
    return OpenAIEngine(client, record, read_record(recorded / POLICY_FILE, KVPolicy))


class OpenAIEngine:
    """A server as it was recorded. Its requests may come from several threads.

    Every request raises MissingRequirement when the server is gone, does not answer in time, or fails.
    """

    def __init__(self, client: Client, record: ServerRecord, policy: KVPolicy) -> None:
        """`policy` is what the configuration says of its cache; nothing of a server shows it."""
        self._client, self._where = client, client.where
        self.url, self.model, self.release, self.says = record.url, record.model, record.release, record.says
        self.top_logprobs, self.vocab_size, self.policy = record.top_logprobs, record.vocab_size, policy

    def forced(self, prompt: Sequence[int], token: int | None) -> Shown:
        """Return the log-probabilities of the most likely tokens after `prompt`, and of `token`, which it is made to say.

        What the server computed for an earlier prompt that this one begins with comes from its prefix cache.
        None forces nothing.
        """
        bias = {} if token is None else {"logit_bias": {str(token): FORCE}}
        completion, where = self._complete(prompt, 1, self.top_logprobs, **bias), self._where
        logprobs = completion.logprobs
        top = (logprobs.top_logprobs or [None])[0]
        if not top or not logprobs.tokens or not logprobs.token_logprobs:
            raise MissingRequirement(f"{where}: gives no log-probabilities of a token; serve with a server that does, as vLLM")
        logp = {token_id(name, self.vocab_size, where): _number(value, where) for name, value in top.items()}
        said = token_id(logprobs.tokens[0], self.vocab_size, where)
        if token is not None and said != token:
            raise MissingRequirement(
                f"{where}: said token {said} where logit_bias forced {token}; serve with a server that has it"
            )
        logp[said] = _number(logprobs.token_logprobs[0], where)
        if len(logp) < min(self.top_logprobs, self.vocab_size):  # what is not shown has no distance
            raise MissingRequirement(
                f"backend.top_logprobs={self.top_logprobs}: {where} shows {len(logp)} tokens; start it with more (vLLM: "
                "--max-logprobs), or ask for fewer"
            )
        if math.fsum(map(math.exp, logp.values())) > MOST_PROBABILITY:
            raise MissingRequirement(f"{where}: its probabilities sum to more than one; serve with a server whose do not")
        return Shown(logp, completion.usage.prompt_tokens, completion.cached_tokens)

    def answer(self, prompt: Sequence[int], max_new_tokens: int, stop_tokens: Collection[int]) -> list[int]:
        """Return a greedy continuation up to the first stop token, which the last token is if the server shows it."""
        completion = self._complete(prompt, max_new_tokens, 1)
        tokens = [token_id(name, self.vocab_size, self._where) for name in completion.logprobs.tokens]
        ends = (place for place, token in enumerate(tokens, start=1) if token in stop_tokens)
        return tokens[: next(ends, None)]

    def timed(self, prompts: Sequence[Sequence[int]], steps: int) -> ServedTimes:
        """Return the times of a load: each prompt alone for one token, then all of them at once for one and for all tokens."""
        first_token_ms = []
        for prompt in prompts:
            began = time.perf_counter()
            self._complete(prompt, 1, 1)
            first_token_ms.append((time.perf_counter() - began) * 1e3)

        def together(tokens: int) -> tuple[float, int]:
            began = time.perf_counter()
            with ThreadPoolExecutor(len(prompts)) as pool:
                answers = list(pool.map(lambda prompt: self._complete(prompt, tokens, 1, ignore_eos=True), prompts))
            return time.perf_counter() - began, sum(len(answer.logprobs.tokens) for answer in answers)

        (once, first), (whole, last) = together(1), together(1 + steps)
        told = last > first and whole > once
        return ServedTimes(first_token_ms, (last - first) / (whole - once) if told else None)

    def _complete(self, prompt: Sequence[int], tokens: int, top: int, **more: Any) -> Completion:
        body = {
            "model": self.model,
            "prompt": list(prompt),
            "max_tokens": tokens,
            "logprobs": top,
            "return_tokens_as_token_ids": True,
            # A server may take others from the model's generation_config.json.
            "temperature": 0.0,
            "top_p": 1.0,
            "repetition_penalty": 1.0,
            **more,
        }
        try:
            answer = self._client.post(COMPLETIONS, body)
        except Refused as error:
            raise UserError(
                f"{self._where}: refuses {len(prompt)} tokens of a prompt with backend.top_logprobs={top} "
                f"({error.status}: {error.text})"
            ) from error
        completion = Completion.read(answer, self._where)
        recorded = self.says.get(FINGERPRINT)
        if recorded is not None and completion.system_fingerprint != recorded:
            called = short(completion.system_fingerprint)
            raise MissingRequirement(
                f"{self._where}: calls its configuration {called}, and was recorded as {recorded}: "
                "it was started with other arguments meanwhile; the same command measures that server from the beginning"
            )
        if completion.usage.prompt_tokens != len(prompt):
            raise MissingRequirement(
                f"{self._where}: counts {completion.usage.prompt_tokens} tokens in a prompt of {len(prompt)} token ids; serve "
                "with a server that takes a prompt as token ids, as vLLM"
            )
        return completion


def _number(value: float | None, where: str) -> float:
    """Return a log-probability; NaN for none, which fails the gates."""
    if value is None:
        return math.nan
    if value > ROUNDING:
        raise MissingRequirement(
            f"{where}: gives {value:.3g} as a log-probability; serve with a server that gives them, as vLLM"
        )
    return value
