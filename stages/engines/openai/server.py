"""Records a server: asks what it says of itself, and checks that it can be judged before any sample is sent."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pipeline.artifacts.digest import file_digest
from pipeline.checkpoint.description import inspect_checkpoint
from pipeline.core.errors import MissingRequirement, UserError, short
from pipeline.core.kv import POLICY_FILE, KVPolicy
from stages.checkpoints import load_tokenizer
from stages.engines.bundle import copy_tokenizer, write_bundle
from stages.engines.openai.client import Client, Refused
from stages.engines.openai.config import OpenAIConfig
from stages.engines.openai.engine import COMPLETIONS, OpenAIEngine, ServerRecord
from stages.engines.openai.protocol import FINGERPRINT, ModelCard, ModelList, cache_config

SIXTEEN = ("auto", "float16", "bfloat16", "float32")
"""Names of vLLM's types of a cache that is not quantized; auto is the checkpoint's, which may be."""
TEXT = 'Invoice 2024-117: 3 crates of Ångström pears,\n\tpaid {"total": 93.10} by Zoë; 你好.\n'
"""Digits, quotes, white space and other scripts: tokenizers that differ differ here."""
PROBE_TOKENS = 200
"""Enough for full blocks of any server's prefix cache, which are of 16 to 128 tokens."""
SAME_LOGP = 0.1
"""Nats by which two answers to the same prompt may differ in 16-bit arithmetic."""


def ask(config: OpenAIConfig, setting: str, url: str) -> dict[str, object]:
    """Return what a server says of itself. `setting` is the configuration's key that gives its url."""
    client = Client(config, setting, url)
    try:
        cards = ModelList.model_validate(client.get("/v1/models")).data
    except (Refused, ValidationError) as error:
        reason = f"{error.status}" if isinstance(error, Refused) else "another form"
        raise UserError(
            f"{client.where}: has no list of models at /v1/models ({reason}); give the root of a server that "
            "speaks OpenAI's API"
        ) from error
    card = _card(cards, client.where, config.model)
    return {
        "setting": setting,
        "url": url,
        "model": card.id,
        "root": card.root,
        "max_model_len": card.max_model_len,
        "release": _release(client),
        "says": _says(client, card.id),
    }


def _card(cards: list[ModelCard], where: str, model: str | None) -> ModelCard:
    names = short(", ".join(card.id for card in cards), 300) or "none"
    if model is None:
        if len(cards) != 1:
            raise UserError(f"backend.model=null: {where} serves {names}; name one")
        return cards[0]
    found = next((card for card in cards if card.id == model), None)
    if found is None:
        raise UserError(f"backend.model={model}: {where} serves {names}; name what it serves")
    return found


def _release(client: Client) -> str:
    """Return what /version says, which is vLLM's own; nothing where there is no such thing."""
    try:
        return str(client.get("/version").get("version", ""))
    except (Refused, UserError):
        return ""


def _says(client: Client, model: str) -> dict[str, str]:
    """Return what vLLM's /metrics say of its cache, and by what name an answer calls the server's configuration."""
    try:
        says = cache_config(client.text("/metrics"))
    except (Refused, UserError):
        says = {}
    try:
        answer = client.post(COMPLETIONS, {"model": model, "prompt": "1", "max_tokens": 1})
    except Refused:
        return says
    fingerprint = answer.get(FINGERPRINT)
    return {**says, FINGERPRINT: fingerprint} if isinstance(fingerprint, str) else says


def write_server(facts: Mapping[str, Any], config: OpenAIConfig, checkpoint: Path, out: Path, *, policy: KVPolicy) -> None:
    """Check that a server can be judged, and write its record."""
    info = inspect_checkpoint(checkpoint)
    client = Client(config, facts["setting"], facts["url"])
    where = client.where
    _check_cache(facts["says"], where, policy)
    (out / POLICY_FILE).write_text(policy.model_dump_json(indent=1) + "\n", encoding="utf-8")
    copy_tokenizer(checkpoint, out)
    record = ServerRecord(
        backend=config.name,
        files={path.name: file_digest(path) for path in sorted(out.iterdir())},
        top_logprobs=config.top_logprobs,
        vocab_size=info.vocab_size,
        **{name: facts[name] for name in ("setting", "url", "model", "release", "says")},
    )
    tokenizer = load_tokenizer(checkpoint)
    _check_tokenizer(client, record, checkpoint, tokenizer, where)
    ids = list(tokenizer(TEXT, add_special_tokens=False)["input_ids"])
    room = min(PROBE_TOKENS, (facts["max_model_len"] or PROBE_TOKENS + 2) - 2)
    prompt = (ids * -(-PROBE_TOKENS // len(ids)))[:room]
    _check_answers(OpenAIEngine(client, record, policy), prompt, where)
    write_bundle(out, record)


def _check_cache(says: Mapping[str, str], where: str, policy: KVPolicy) -> None:
    """Refuse a server that says that its cache is another one than the policy's, or that it reuses nothing."""
    dtype = says.get("cache_dtype", "")
    if dtype and policy.key.exact and dtype not in SIXTEEN:
        raise UserError(f"{where}: says that its cache is of type {dtype}; kv={policy.name} takes a server with a 16-bit cache")
    if dtype in SIXTEEN[1:] and not policy.key.exact:
        raise UserError(f"{where}: says that its cache is of type {dtype}; kv={policy.name} takes a server with that cache")
    if says.get("enable_prefix_caching") == "False":
        raise _no_reuse(where)


def _no_reuse(where: str) -> UserError:
    return UserError(
        f"{where}: takes no prompt from its prefix cache, so that nothing would read what it stores; start it with prefix "
        "caching (vLLM: --enable-prefix-caching)"
    )


def _check_tokenizer(client: Client, record: ServerRecord, checkpoint: Path, tokenizer: Any, where: str) -> None:
    """Refuse a server whose tokens are others: by /tokenize, or else by how many tokens it counts in a text."""
    known = list(tokenizer(TEXT, add_special_tokens=False)["input_ids"])
    other = UserError(
        f"model.path={checkpoint}: its tokenizer is not that of {record.model}, which {where} serves; give the served model"
    )
    try:
        tokens = client.post("/tokenize", {"model": record.model, "prompt": TEXT, "add_special_tokens": False}).get("tokens")
    except (Refused, UserError):
        tokens = None
    if tokens is not None:
        if tokens != known:
            raise other
        return
    try:
        usage = client.post(COMPLETIONS, {"model": record.model, "prompt": TEXT, "max_tokens": 1}).get("usage")
    except Refused as error:
        raise UserError(f"{where}: refuses a text of {len(known)} tokens ({error.status}: {error.text})") from error
    counted = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    if counted not in (len(known), len(tokenizer(TEXT)["input_ids"])):
        raise other


def _check_answers(engine: OpenAIEngine, prompt: list[int], where: str) -> None:
    """Refuse a server that does not show its own distribution, or reuses no prefix."""
    free = engine.forced(prompt, None)
    unlikely = next((token for token in range(engine.vocab_size) if token not in free.logp), None)
    if unlikely is None:
        raise MissingRequirement(f"{where}: shows all {engine.vocab_size} tokens, where {engine.top_logprobs} were asked for")
    forced = engine.forced(prompt, unlikely)
    common = free.logp.keys() & forced.logp.keys()
    differs = any(abs(free.logp[token] - forced.logp[token]) > SAME_LOGP for token in common)
    likeliest = max(free.logp, key=lambda token: -math.inf if math.isnan(free.logp[token]) else free.logp[token])
    if differs or likeliest not in common or forced.logp[unlikely] >= min(free.logp.values()) + SAME_LOGP:
        raise MissingRequirement(
            f"{where}: shows log-probabilities as logit_bias makes them; start it so that it shows the model's own (vLLM: "
            "--logprobs-mode raw_logprobs)"
        )
    if forced.cached_tokens == 0:
        raise _no_reuse(where)
