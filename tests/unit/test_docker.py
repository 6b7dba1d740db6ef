"""The images and the compose file, as far as they can be checked without a Docker engine; docs/docker.md says what was run
by hand."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from compose_spec import PyCompose

from pipeline.core.redaction import secret_name

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "Dockerfile"
COMPOSE = ROOT / "docs" / "docker" / "compose.yaml"
TARGETS = ("cpu", "trtllm")


def stages() -> dict[str, list[tuple[str, str]]]:
    """(instruction, rest) of each stage by its name; what stands before the first is under ""."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if not line.lstrip().startswith("#")]
    found: dict[str, list[tuple[str, str]]] = {"": []}
    name = ""
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        if line.strip():
            word, _, rest = line.strip().partition(" ")
            if word == "FROM":
                name = rest.split(" AS ")[1]
                found[name] = []
            found[name].append((word, rest))
    return found


def values(stage: str, word: str) -> list[str]:
    return [rest for instruction, rest in stages()[stage] if instruction == word]


def test_hadolint_has_nothing_to_say() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    result = subprocess.run([hadolint, DOCKERFILE], check=False, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, ""), result.stdout + result.stderr


def test_every_base_image_is_another_stage_or_a_tag_that_can_be_replaced_by_a_digest() -> None:
    defaults = dict(rest.split("=", 1) for _, rest in stages()[""])
    assert defaults["TRTLLM_IMAGE"] == "nvcr.io/nvidia/tensorrt-llm/release:1.2.1"
    assert all(re.search(r":\d+\.\d+\.\d+", image) for image in defaults.values()), "a tag of a whole version"
    bases = {values(name, "FROM")[0].split(" AS ")[0] for name in stages() if name}
    assert bases == {f"${{{name}}}" for name in defaults}


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_runs_as_nobody_in_particular_and_is_asked_how_it_is(target: str) -> None:
    assert values(target, "USER")[-1] == "10001:10001", "by number: Kubernetes' runAsNonRoot cannot look up a name"
    (health,) = values(target, "HEALTHCHECK")
    options, _, command = health.partition(" CMD ")
    assert all(f"--{name}=" in options for name in ("interval", "timeout", "retries"))
    assert json.loads(command)[-3:] == ["-m", "pipeline", "--version"]
    assert json.loads(values(target, "ENTRYPOINT")[0]) == ["python", "-P", "-m", "pipeline", "workdir=/work"]


def test_the_trtllm_image_leaves_the_interpreter_of_tensorrt_llm_alone_and_presets_it() -> None:
    environment = dict(pair.split("=", 1) for rest in values("trtllm", "ENV") for pair in rest.split())
    assert environment["KVGATE_TRTLLM_PYTHON"] == "/usr/bin/python3"
    assert environment["PATH"].startswith("/opt/kvgate/bin:")
    (install, _) = values("trtllm", "RUN")
    for step in re.split(r"\s+&&\s+", install):
        if " -m pip install " in step:
            assert " --target /build/" in step, f"{step}: changes the image's own interpreter"
    exported = install.index("export PIP_CONSTRAINT='' ")
    assert exported < install.index("/opt/kvgate/bin/pip install"), "the image's own constraints are for its own"
    config = (ROOT / "conf" / "backend" / "trtllm.yaml").read_text()
    assert "\npython: ${oc.env:KVGATE_TRTLLM_PYTHON,null}\n" in config


def test_the_preset_interpreter_is_the_default_of_backend_python(monkeypatch: pytest.MonkeyPatch) -> None:
    from pipeline.config.compose import plan

    def python(*overrides: str) -> object:
        return plan(["backend=trtllm", "stage=build", *overrides], multirun=False).jobs[0].model_dump()["backend"]["python"]

    assert python() is None
    monkeypatch.setenv("KVGATE_TRTLLM_PYTHON", "/usr/bin/python3")
    assert python() == "/usr/bin/python3"
    assert python("backend.python=/opt/other") == "/opt/other"


def test_no_secret_is_baked_into_an_image() -> None:
    for stage in stages():
        for rest in [*values(stage, "ENV"), *values(stage, "ARG")]:
            for pair in rest.split():
                assert not secret_name(pair.partition("=")[0]), pair


def test_what_is_copied_exists_and_is_not_ignored() -> None:
    ignored = (ROOT / ".dockerignore").read_text().split()
    own = [rest for stage in stages() for rest in values(stage, "COPY") if "--from" not in rest]
    copied = {source for rest in own for source in rest.split()[:-1]}
    assert {"pyproject.toml", "pipeline", "conf", "requirements/run.lock"} <= copied
    for source in copied:
        assert (ROOT / source).exists()
        assert source.split("/")[0] not in ignored


def test_every_shell_step_can_be_parsed_by_sh() -> None:
    for stage in stages():
        for step in values(stage, "RUN"):
            subprocess.run(["sh", "-n", "-c", step], check=True, capture_output=True)


@pytest.mark.parametrize("stage", ["wheel", "cpu-venv", "trtllm"])
def test_an_image_installs_what_is_locked_by_hash_and_nothing_else(stage: str) -> None:
    steps = [step.strip() for rest in values(stage, "RUN") for step in rest.split("&&")]
    installs = [step for step in steps if re.search(r"\bpip (install|wheel) ", step) and "--target /build/" not in step]
    assert installs
    for step in installs:
        locked = "--require-hashes -r /build/" in step
        given = "torch==" in step or "kvgate-*.whl" in step or step.endswith("--wheel-dir /dist .")
        assert locked or (given and "--no-deps" in step), step
    assert not any("PIP_BUILD_CONSTRAINT" in rest for rest in [*values(stage, "ENV"), *values(stage, "RUN")])


def interpolated(environment: dict[str, str]) -> str:
    """The compose file with its variables put in, as `docker compose config` shows it."""

    def value(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        if environment.get(match[1]):
            return environment[match[1]]
        assert match[2] == ":-", f"{match[1]}: {match[3]}"
        return match[3]

    return re.sub(r"\$\$|\$\{(\w+)(:[-?])([^}]*)\}", value, COMPOSE.read_text())


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    """The compose file, valid by the compose specification: unknown keys and undefined volumes, networks, secrets raise."""
    parsed = PyCompose.from_yaml(interpolated({"KVGATE_DB_PASSWORD_FILE": "/etc/kvgate/password"}))
    parsed.validate()
    content: dict[str, Any] = parsed.to_dict()
    return content


def test_the_compose_file_says_which_variable_is_missing() -> None:
    with pytest.raises(AssertionError, match="KVGATE_DB_PASSWORD_FILE: a file with the password"):
        interpolated({})


def test_each_service_starts_when_what_it_needs_is_healthy(compose: dict[str, Any]) -> None:
    services = compose["services"]
    assert services["mlflow"]["depends_on"] == {"postgres": {"condition": "service_healthy"}}
    assert services["kvgate"]["depends_on"] == {"mlflow": {"condition": "service_healthy"}}
    for name in ("postgres", "mlflow"):
        assert services[name]["healthcheck"]["test"][0] == "CMD"
        assert services[name]["restart"] == "unless-stopped"
    assert re.fullmatch(r"postgres:\d+\.\d+-\w+", services["postgres"]["image"])
    assert services["mlflow"]["build"]["target"] == "cpu"
    assert (COMPOSE.parent / services["mlflow"]["build"]["context"]).resolve() == ROOT
    assert services["kvgate"]["environment"]["MLFLOW_TRACKING_URI"] == "http://mlflow:5000"


def test_the_database_is_reached_by_nobody_else_and_its_password_stands_nowhere(compose: dict[str, Any]) -> None:
    services = compose["services"]
    assert compose["networks"]["backend"]["internal"] is True
    assert "ports" not in services["postgres"]
    assert services["kvgate"]["networks"] == ["frontend"]
    assert all(port.startswith("127.0.0.1:") for port in services["mlflow"]["ports"])
    assert services["postgres"]["environment"]["POSTGRES_PASSWORD_FILE"] == "/run/secrets/db_password"
    for service in services.values():
        said = " ".join([*service.get("entrypoint", []), *service.get("command", [])])
        assert not re.search(r"://[^/\s]*:[^/\s]*@", said), "a password in an address"
        assert said.count("PASSWORD") == said.count('PGPASSWORD="$(cat /run/secrets/')
        for name, value in service.get("environment", {}).items():
            assert not secret_name(name) or str(value).startswith("/run/secrets/"), name


def test_the_servers_entry_point_hands_the_password_to_one_process_only(compose: dict[str, Any], tmp_path: Path) -> None:
    """The shell step for real, with a stand-in for mlflow and for the secret's file."""
    secret = tmp_path / "db_password"
    secret.write_text("p w'$x\n")
    tool = tmp_path / "mlflow"
    tool.write_text('#!/bin/sh\nprintf "%s\\n" "$PGPASSWORD" "$@"\n')
    tool.chmod(0o755)
    shell, flag, script, *rest = compose["services"]["mlflow"]["entrypoint"]
    script = script.replace("/run/secrets/db_password", str(secret))
    command = [shell, flag, script, *rest, *compose["services"]["mlflow"]["command"]]
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    said = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout.splitlines()
    assert said[:2] == ["p w'$x", "server"]
    assert said[2:] == compose["services"]["mlflow"]["command"][1:]
