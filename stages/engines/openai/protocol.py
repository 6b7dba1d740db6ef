"""What a server answers, as far as it is read. Unknown keys are left alone, since every server has its own."""

import re
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from pipeline.core.errors import MissingRequirement

FINGERPRINT = "system_fingerprint"
TOKEN = re.compile(r"token_id:([0-9]{1,12})")
"""A token, where a server is asked to name tokens by their ids."""
CACHE_LINE = re.compile(r"^vllm:cache_config_info\{(.*)\} ", re.MULTILINE)
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
CACHE_LABELS = ("cache_dtype", "block_size", "enable_prefix_caching")


class ModelCard(BaseModel):
    """A model of /v1/models; `created` changes with every answer."""

    id: str
    root: str | None = None
    max_model_len: int | None = None


class ModelList(BaseModel):
    """Answer to GET /v1/models."""

    data: list[ModelCard]


class _Details(BaseModel):
    cached_tokens: int | None = None


class _Usage(BaseModel):
    prompt_tokens: int
    prompt_tokens_details: _Details | None = None


class _Logprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None]


class _Choice(BaseModel):
    logprobs: _Logprobs | None = None


class Completion(BaseModel):
    """Answer to POST /v1/completions."""

    choices: list[_Choice] = Field(min_length=1)
    usage: _Usage
    system_fingerprint: str | None = None
    """What the server calls its configuration, as OpenAI's API has it."""

    @classmethod
    def read(cls, answer: dict[str, Any], where: str) -> "Completion":
        """Read an answer. Raises MissingRequirement where it is of another form, or has no log-probabilities."""
        try:
            completion = cls.model_validate(answer)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            raise MissingRequirement(
                f"{where}: does not answer /v1/completions as OpenAI's API ({place}: {first['msg']})"
            ) from None
        if completion.choices[0].logprobs is None:
            raise MissingRequirement(f"{where}: gives no log-probabilities; serve with a server that does, as vLLM")
        return completion

    @property
    def logprobs(self) -> _Logprobs:
        logprobs = self.choices[0].logprobs
        assert logprobs is not None, "read checked it"
        return logprobs

    @property
    def cached_tokens(self) -> int | None:
        """Tokens of the prompt that came from the prefix cache; None where the server does not say."""
        details = self.usage.prompt_tokens_details
        return None if details is None else details.cached_tokens


def token_id(name: str, vocab_size: int, where: str) -> int:
    """Return the token that a server names. Raises MissingRequirement where it names it by its text, or one that is none."""
    found = TOKEN.fullmatch(name)
    if found is None:
        raise MissingRequirement(
            f"{where}: names tokens by their text ({name[:20]!r}), which several tokens may share; serve with a server that "
            "has return_tokens_as_token_ids, as vLLM"
        )
    token = int(found[1])
    if token >= vocab_size:
        raise MissingRequirement(f"{where}: names token {token}, the model has {vocab_size}; serve the model of model.path")
    return token


def cache_config(metrics: str) -> dict[str, str]:
    """Return what vLLM's /metrics say of its cache; nothing for another server."""
    line = CACHE_LINE.search(metrics)
    labels = dict(LABEL.findall(line[1])) if line is not None else {}
    return {name: labels[name] for name in CACHE_LABELS if name in labels}
