"""Secrets are detected and masked, and planted ones never show in output, files, refusals, logs or child processes."""

import io
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline import __main__ as command
from pipeline.cli import console
from stages.core import hardware
from stages.core.redaction import MASK, holds_secret, redact, redact_text, secret_name
from stages.core.streams import RedactedStream
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


def leaked_secrets(text: str) -> list[str]:
    return [secret for secret in NEVER if secret in text]


IN_A_URI = "tracking.uri must not hold a password; set MLFLOW_TRACKING_URI in the environment instead"
IN_A_KEY = "holds a password or a key, and configurations are printed and logged; leave it out"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("tracking.uri='http://user:hunter2@host'", IN_A_URI),
        ("tracking.uri='postgresql+x://u:hun/ter2@h'", IN_A_URI),
        ("tracking.uri='postgresql://h/db?user=u&password=hunter2'", IN_A_URI),
        ("tracking.uri='mssql+pyodbc:///?odbc_connect=DRIVER%3DODBC%3BUID%3Du%3BPWD%3Dhunter2'", IN_A_URI),
        ("backend.url=[http://user:hunter2@h/]", f"backend.url: {IN_A_KEY}"),
        ("tracking.experiment=${oc.env:HF_TOKEN}", f"tracking.experiment: {IN_A_KEY}"),
        ("workdir=AKIAABCDEFGHIJKLMNOP", f"workdir: {IN_A_KEY}"),
        ("+hydra.job.env_set.X=hf_0123456789abcdefghij", f"hydra.job.env_set.X: {IN_A_KEY}"),
    ],
)
@pytest.mark.usefixtures("planted")
def test_a_secret_argument_is_refused_before_any_write(
    override: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["pipeline", "-m", "kv=fp8,int8", override])
    assert command.main() == 2
    output = "".join(capsys.readouterr())
    assert message in output
    assert not any(part in output for part in ("hunter2", "ter2", "AKIAABCDEFGHIJKLMNOP", "hf_0123456789"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "text",
    [
        "/etc/passwd: is a file",
        "--config-dir=/data/api_key: no such directory",
        "workdir=my-secret: is not a directory",
        "model.path=../client-secret: no such directory",
        "password_file=/run/secrets/db",
    ],
)
def test_a_message_about_a_path_keeps_its_words(text: str) -> None:
    assert redact_text(text, {}) == text
    assert redact_text(f"{text}: password: hunter2", {}) == f"{text}: password: {MASK}"


def test_the_path_of_a_credentials_file_is_not_masked(tmp_path: Path) -> None:
    (tmp_path / "credentials.json").touch()
    environ = {"GOOGLE_CREDENTIALS": str(tmp_path / "credentials.json"), "TOKEN": "ab"}
    assert redact_text(f"{tmp_path}/credentials.json ab", environ) == f"{tmp_path}/credentials.json ab"


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch])
def test_a_secret_that_a_file_here_has_as_its_name_is_masked(
    make: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "artifacts")
    assert redact_text("it failed (artifacts)", {"DB_PASSWORD": "artifacts"}) == f"it failed ({MASK})"


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
    assert leaked_secrets(printed.getvalue()) == []


@pytest.mark.usefixtures("planted")
def test_no_other_program_gets_a_secret_or_a_cloud_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library's interpreter, the compiler, and the driver's tool."""
    monkeypatch.setenv("AWS_PROFILE", "staging")
    for name in ("cc", "nvidia-smi"):
        (tmp_path / name).write_text(f"#!/bin/sh\nenv >> {tmp_path}/seen\necho {name} 1, 9.0, 580\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "worker.py").write_text(f"import os\nopen({str(tmp_path / 'seen')!r}, 'a').write(str(os.environ))\ninput()\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(compiler, "_processor", lambda: ("x", frozenset(compiler.FEATURES)))
    for cached in (compiler.find_compiler, hardware.gpus):
        cached.cache_clear()
    try:
        assert compiler.find_compiler() is not None
        assert hardware.gpus()
        with Worker(Program("vllm", "vLLM", tmp_path / "worker.py", ""), sys.executable, OMP_NUM_THREADS="1"):
            pass
    finally:
        for cached in (compiler.find_compiler, hardware.gpus):
            cached.cache_clear()
    recorded = (tmp_path / "seen").read_text()
    assert recorded.count("PATH=") >= 2
    assert "OMP_NUM_THREADS" in recorded
    assert "AWS_" not in recorded
    assert leaked_secrets(recorded) == []


@pytest.mark.usefixtures("planted")
def test_a_job_in_a_process_of_its_own_prints_no_secret() -> None:
    redacting = "from stages.core.streams import redact_output; redact_output(); redact_output()"
    program = f"import os; {redacting}; raise SystemExit(str(os.environ) + {str(NEVER)!r})"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert MASK in result.stderr
    assert leaked_secrets(result.stderr) == []


def test_only_names_of_secrets_are_masked() -> None:
    secret = (
        "hf_token HF_TOKEN hub.hfToken password db.passwd client_secret secrets.hub api_key apiKey wandb.key auth "
        "aws.access-key Authorization registry.credentials.user"
    )
    domain = "kv.key.dtype kv.key kv.sink_tokens max_new_tokens tokenizer cache.key tokens_per_s eos_token keys monkey passes"
    assert [name for name in f"{secret} {domain}".split() if secret_name(name)] == secret.split()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("https://user:pw@host/path", f"https://{MASK}@host/path"),
        ("postgresql://me:p@ss@db:5432/mlflow", f"postgresql://{MASK}@db:5432/mlflow"),
        ("https://token@host", f"https://{MASK}@host"),
        ("see https://host/a?x=1&token=abc&y=2", f"see https://host/a?x=1&token={MASK}&y=2"),
        ("PASSWORD=hunter2 next", f"PASSWORD={MASK} next"),
        ("password: hunter2", f"password: {MASK}"),
        ("http://h/a?password: hunter2", f"http://h/a?password: {MASK}"),
        ("/db/password=hunter2", f"/db/password={MASK}"),
        ("user=bob|password: hunter2", f"user=bob|password: {MASK}"),
        ("a;pwd: hunter2", f"a;pwd: {MASK}"),
        ('{"api_key": "abc"}', f'{{"api_key": "{MASK}"}}'),
        ("{'api_key': 'abc', 'x': 1}", f"{{'api_key': '{MASK}', 'x': 1}}"),
        ("password: 'hun ter2'", f"password: '{MASK}'"),
        ('password="hun\\"t, er2" next', f'password="{MASK}" next'),
        ('{\\"password\\": \\"hun, ter2\\"}', f'{{\\"password\\": \\"{MASK}\\"}}'),
        (r"password=Tr0ub\4dor next", f"password={MASK} next"),
        *((text, text) for text in ('{"password": null, "a": 1}', '{"api_key": 5}', '{"secret" : [1,2]}')),
        ('password="not closed', f'password="{MASK} closed'),
        *((text, text) for text in ('password=""', "password: ", "secret=, x")),
        ("Authorization: Bearer abcdefghijkl", f"Authorization: Bearer {MASK}"),
        ("hf_abcdefghijklmnopqrstuv", MASK),
        ("AKIAABCDEFGHIJKLMNOP", MASK),
        *(
            (text, text)
            for text in ("/models/hf_llama_3_2_1b_instruct", "/data/sk-learn-of-some-length", "sqlite:////work/a.db")
        ),
        *((text, text) for text in ("http://h:5000", "https://host/a@b", "mail me@example.org", "tokens per second: 12")),
        *((text, text) for text in ("per_token", "a key: 17 records", "hf_hub", '{"key": "fp8", "value": "int4"}')),
    ],
    ids=lambda _: "text",  # pytest writes ids into the environment, where secrets are looked for
)
def test_only_secrets_are_masked_in_text(text: str, expected: str) -> None:
    assert redact_text(text) == expected
    assert holds_secret(text) == (text != expected)


def test_secrets_are_masked_at_any_depth_except_numbers() -> None:
    value = {"hub": [{"token": "abc"}], "stop_token": "</s>", "max_token": 5, "urls": ["https://u:p@h"]}
    expected = {"hub": [{"token": MASK}], "stop_token": "</s>", "max_token": 5, "urls": [f"https://{MASK}@h"]}
    assert redact(value) == expected
