"""Secrets are detected and masked, and planted ones never show in output, files, refusals, logs or child processes."""

import io
import os
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

from pipeline import __main__ as command
from pipeline.cli import console
from stages.core import hardware
from stages.core.redaction import MASK, PARAM_CHARS, RedactedStream, clip, holds_secret, redact, redact_text, secret_name
from stages.engines.interpreter.process import Program, Worker
from stages.engines.onnx.native import compiler

SECRET = "correct horse/battery@staple"
QUOTED = "correct%20horse%2Fbattery%40staple"
PLANTED = {
    "MLFLOW_TRACKING_URI": f"http://me:{QUOTED}@tracking:5000",
    "MLFLOW_TRACKING_PASSWORD": SECRET,
    "MLFLOW_TRACKING_TOKEN": "token-of-tracking",
    "HF_TOKEN": "hf_0123456789abcdefghij",
    "AWS_ACCESS_KEY_ID": "AKIAABCDEFGHIJKLMNOP",
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI/K7MDENG",
    "AWS_SESSION_TOKEN": "FwoGZXIvYXdzEXAMPLE",
    "OPENAI_API_KEY": "the-key-of-a-server",
    "PGPASSWORD": "postgres-password",
    "HTTPS_PROXY": "http://proxy-user:proxy-password@proxy:3128",
}
NEVER = (
    *(SECRET, QUOTED, "token-of-tracking", "hf_0123456789abcdefghij", "AKIAABCDEFGHIJKLMNOP", "wJalrXUtnFEMI/K7MDENG"),
    *("FwoGZXIvYXdzEXAMPLE", "the-key-of-a-server", "postgres-password", "proxy-password"),
)


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in PLANTED.items():
        monkeypatch.setenv(name, value)


def shown(text: str) -> list[str]:
    return [secret for secret in NEVER if secret in text]


URIS = [
    "http://user:hunter2@host",
    "postgresql://user:hunter2@db/mlflow",
    "postgresql+x://u:hun/ter2@h",
    "postgresql://h/db?user=u&password=hunter2",
    "mssql+pyodbc:///?odbc_connect=DRIVER%3DODBC%3BUID%3Du%3BPWD%3Dhunter2",
]


@pytest.mark.parametrize("uri", URIS)
def test_a_tracking_uri_with_a_password_is_refused_before_any_file_is_written(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["pipeline", "-m", "kv=fp8,int8", f"tracking.uri='{uri}'"])
    assert command.main() == 2
    said = "".join(capsys.readouterr())
    assert "tracking.uri must not hold a password; set MLFLOW_TRACKING_URI in the environment instead" in said
    assert not any(part in said for part in ("hunter2", "hun/ter2", "ter2"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("backend.url=[http://user:hunter2@h/]", "backend.url"),
        ("tracking.experiment='password=hunter2'", "tracking.experiment"),
        ("tracking.experiment=${oc.env:HF_TOKEN}", "tracking.experiment"),
        ("model.path=https://u:hunter2@host/model", "model.path"),
        ("workdir=AKIAABCDEFGHIJKLMNOP", "workdir"),
        ("+hydra.job.env_set.X=hf_0123456789abcdefghij", "hydra.job.env_set.X"),
    ],
)
@pytest.mark.usefixtures("planted")
def test_a_secret_in_another_key_is_refused_by_the_key_alone(
    override: str, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["pipeline", override])
    assert command.main() == 2
    said = "".join(capsys.readouterr())
    why = "holds a password or a key, and configurations are printed and logged; leave it out"
    assert said == f"pipeline: error: {key}: {why}\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "value", ["/models/hf_llama_3_2_1b_instruct", "/data/sk-learn-of-some-length", "sqlite:////work/a.db", "http://h:5000"]
)
def test_ordinary_values_are_no_secrets(value: str) -> None:
    assert not holds_secret(value)


@pytest.mark.parametrize(
    "text",
    [
        "/etc/passwd: is a file",
        "--config-dir=/data/api_key: no such directory",
        "workdir=my-secret: is not a directory",
        "model.path=../client-secret: no such directory",
        "C:\\keys\\passwd: is a file",
        "password_file=/run/secrets/db",
    ],
)
def test_a_message_about_a_path_keeps_its_words(text: str) -> None:
    assert redact_text(text, {}) == text
    assert redact_text(f"{text}: password: hunter2", {}) == f"{text}: password: {MASK}"


@pytest.mark.usefixtures("planted")
def test_secrets_of_the_environment_are_masked_everywhere() -> None:
    for secret in NEVER:
        assert redact_text(f"it failed ({secret}).") == f"it failed ({MASK})."


def test_a_file_that_a_variable_names_is_no_secret(tmp_path: Path) -> None:
    (tmp_path / "credentials.json").touch()
    environ = {"GOOGLE_CREDENTIALS": str(tmp_path / "credentials.json"), "TOKEN": "ab"}
    assert redact_text(f"{tmp_path}/credentials.json ab", environ) == f"{tmp_path}/credentials.json ab"


@pytest.mark.usefixtures("planted")
def test_a_traceback_and_a_table_show_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = io.StringIO()
    stream = RedactedStream(printed)
    try:
        raise RuntimeError(f"cannot reach http://me:{SECRET}@tracking:5000")
    except RuntimeError:
        traceback.print_exc(file=stream)
    monkeypatch.setattr(sys, "stdout", stream)
    console.out.print(f"server {PLANTED['HTTPS_PROXY']}", soft_wrap=True)
    assert "Traceback" in printed.getvalue()
    assert printed.getvalue().count(MASK) > 1
    assert shown(printed.getvalue()) == []


@pytest.mark.usefixtures("planted")
def test_a_librarys_interpreter_gets_no_secret_and_no_cloud_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "staging")
    script = tmp_path / "worker.py"
    script.write_text(f"import os\nopen({str(tmp_path / 'seen')!r}, 'w').write(str(dict(os.environ)))\ninput()\n")

    with Worker(Program("vllm", "vLLM", script, ""), sys.executable, OMP_NUM_THREADS="1"):
        pass
    seen = (tmp_path / "seen").read_text()
    assert "OMP_NUM_THREADS" in seen
    assert "AWS_" not in seen
    assert shown(seen) == []


@pytest.mark.usefixtures("planted")
def test_neither_compiler_nor_driver_tool_sees_a_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cc", "nvidia-smi"):
        (tmp_path / name).write_text(f"#!/bin/sh\nenv >> {tmp_path}/seen\necho {name} 1, 9.0, 580\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(compiler, "_processor", lambda: ("x", frozenset(compiler.FEATURES)))
    for cached in (compiler.find_compiler, hardware.gpus):
        cached.cache_clear()
    try:
        assert compiler.find_compiler() is not None
        assert hardware.gpus()
    finally:
        for cached in (compiler.find_compiler, hardware.gpus):
            cached.cache_clear()
    seen = (tmp_path / "seen").read_text()
    assert seen.count("PATH=") >= 2
    assert shown(seen) == []


@pytest.mark.usefixtures("planted")
def test_a_job_in_a_process_of_its_own_prints_no_secret() -> None:
    redacting = "from stages.core.redaction import redact_output; redact_output(); redact_output()"
    program = f"import os; {redacting}; raise SystemExit(str(os.environ))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert MASK in result.stderr
    assert shown(result.stderr) == []


@pytest.mark.parametrize(
    "text",
    [
        "password: hunter2",
        "http://h/a?password: hunter2",
        "/db/password=hunter2",
        "user=bob|password: hunter2",
        "a;pwd: hunter2",
    ],
)
def test_an_assigned_value_next_to_a_path_is_a_secret(text: str) -> None:
    assert "hunter2" not in redact_text(text, {})


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
