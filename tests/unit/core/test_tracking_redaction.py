"""Detection of secrets in names and texts, and their masking."""

import pytest

from stages.core.redaction import MASK, PARAM_CHARS, clip, redact, redact_text, secret_name


@pytest.mark.parametrize(
    "name",
    ["hf_token", "HF_TOKEN", "hub.hfToken", "password", "db.passwd", "client_secret", "secrets.hub", "api_key", "apiKey",
     "wandb.key", "aws.access-key", "auth", "Authorization", "registry.credentials.user"],
)  # fmt: skip
def test_names_of_secrets_are_recognised(name: str) -> None:
    assert secret_name(name)


@pytest.mark.parametrize(
    "name",
    ["kv.key.dtype", "kv.key.granularity", "kv.key", "kv.sink_tokens", "kv.recent_tokens", "max_new_tokens", "tokenizer",
     "tokens_per_s", "eos_token", "pad_token", "keys", "monkey", "gates.max_mean_kl", "passes", "cache.key"],
)  # fmt: skip
def test_names_of_the_domain_are_not_taken_for_secrets(name: str) -> None:
    assert not secret_name(name)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("https://user:pw@host/path", f"https://{MASK}@host/path"),
        ("postgresql://me:p@ss@db:5432/mlflow", f"postgresql://{MASK}@db:5432/mlflow"),
        ("https://token@host", f"https://{MASK}@host"),
        ("see https://host/a?x=1&token=abc&y=2", f"see https://host/a?x=1&token={MASK}&y=2"),
        ("PASSWORD=hunter2 next", f"PASSWORD={MASK} next"),
        ('{"api_key": "abc"}', f'{{"api_key": "{MASK}"}}'),
        ("Authorization: Bearer abcdefghijkl", f"Authorization: Bearer {MASK}"),
        ("hf_abcdefghijklmnopqrstuv", MASK),
        ("AKIAABCDEFGHIJKLMNOP", MASK),
    ],
)
def test_secrets_inside_text_are_masked(text: str, expected: str) -> None:
    assert redact_text(text) == expected


@pytest.mark.parametrize(
    "text",
    ["https://host/a@b", "mail me@example.org", "tokens per second: 12", "per_token", "a key: 17 records", "hf_hub",
     '{"key": "fp8", "value": "int4"}'],
)  # fmt: skip
def test_ordinary_text_is_left_alone(text: str) -> None:
    assert redact_text(text) == text


def test_secrets_are_masked_at_any_depth_and_numbers_are_not_secrets() -> None:
    value = {"hub": [{"token": "abc"}], "stop_token": "</s>", "max_token": 5, "urls": ["https://u:p@h"]}
    expected = {"hub": [{"token": MASK}], "stop_token": "</s>", "max_token": 5, "urls": [f"https://{MASK}@h"]}
    assert redact(value) == expected


def test_a_long_parameter_is_cut_and_still_differs_from_its_neighbour() -> None:
    one, other = clip("a" * 7000 + "x"), clip("a" * 7000 + "y")
    assert len(one) <= PARAM_CHARS
    assert one != other
    assert "7001 characters, sha256" in one
