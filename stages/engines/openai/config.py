"""Configuration of backend=openai."""

import os
import re
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from pipeline.core.backends import BackendConfig
from pipeline.core.errors import UserError


class OpenAIConfig(BackendConfig):
    """Servers that speak OpenAI's API, by URL; nothing is built or started."""

    name: Literal["openai"]
    builds = False
    takes_quantized = True
    url: str | None
    """The server that is judged, as http://HOST:PORT, with or without /v1."""
    baseline_url: str | None
    """The same engine and model with a 16-bit cache."""
    canary_url: str | None
    """The judged one with a corrupted scale; null where there is none, and then nothing shows that the gates see the cache."""
    model: str | None
    """The name by which all of them serve the model; null is the only one that a server has."""
    api_key_env: str | None
    """Name of the environment variable that holds the key; the key itself is written nowhere."""
    top_logprobs: Annotated[int, Field(ge=10, le=1000)]
    """Most likely tokens whose log-probabilities a request asks for; the top-10 overlap takes ten."""
    timeout_s: Annotated[float, Field(gt=0, le=86_400)]
    """Seconds that a request may take."""
    retries: Annotated[int, Field(ge=0, le=100)]
    """How often a request is sent again after a time-out, a connection that broke, 429 or 5xx."""

    @field_validator("url", "baseline_url", "canary_url")
    @classmethod
    def _is_a_root(cls, value: str | None) -> str | None:
        if value is None:
            return None
        root = value.rstrip("/").removesuffix("/v1")
        try:
            parts = urlsplit(root)
            whole = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
        except ValueError:
            parts, whole = urlsplit(""), False
        if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
            raise PydanticCustomError(
                "secret_url", "holds credentials or a query; give http://HOST:PORT, and a key by backend.api_key_env"
            )
        if not whole:
            raise PydanticCustomError("no_url", "must be http://HOST:PORT or https://HOST:PORT")
        return root

    @field_validator("api_key_env")
    @classmethod
    def _is_a_name(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", value):
            raise PydanticCustomError("secret_name", "must be the name of an environment variable, not the key itself")
        return value

    @model_validator(mode="after")
    def _are_different_servers(self) -> Self:
        given = [url for url in (self.url, self.baseline_url, self.canary_url) if url is not None]
        for name in ("baseline_url", "canary_url"):
            url = getattr(self, name)
            if url is not None and given.count(url) > 1:
                raise ValueError(f"{name}={url}: is another one's url as well; give each role a server of its own")
        return self

    def api_key(self) -> str | None:
        """Return the servers' key from the environment. Raises UserError where the variable is not set."""
        if self.api_key_env is None:
            return None
        key = os.environ.get(self.api_key_env)
        if not key or not key.isascii() or not key.isprintable():
            state = "holds no key" if key else "is not set"
            raise UserError(f"backend.api_key_env={self.api_key_env}: the variable {state}; export it")
        return key
