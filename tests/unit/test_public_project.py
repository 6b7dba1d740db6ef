"""What a public project has: a license, a way to report, templates and hooks, each well-formed and about this project."""

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
TEMPLATES = ROOT / ".github" / "ISSUE_TEMPLATE"
INPUTS = {"textarea", "input", "dropdown", "checkboxes"}


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def test_the_license_is_the_whole_apache_license_and_the_package_says_so() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License\n                           Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text
    assert re.findall(r"^   (\d)\. ", text, re.MULTILINE) == list("123456789")
    assert (PROJECT["project"]["license"], PROJECT["project"]["license-files"]) == ("Apache-2.0", ["LICENSE"])


def test_classifiers_promise_the_pythons_that_may_install_it() -> None:
    versions = {c.rpartition("3.")[2] for c in PROJECT["project"]["classifiers"] if ":: 3." in c}
    lowest, above = map(int, re.findall(r"[>=<]3\.(\d+)", PROJECT["project"]["requires-python"]))
    assert versions == {str(minor) for minor in range(lowest, above)}


@pytest.mark.parametrize("package", ["pipeline", "stages", "plugins"])
def test_packages_with_types_say_so_in_the_wheel(package: str) -> None:
    assert (ROOT / package / "py.typed").is_file()
    assert "py.typed" in PROJECT["tool"]["setuptools"]["package-data"][package]


def test_security_says_how_to_report_privately_and_names_no_mailbox() -> None:
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    assert "Report a vulnerability" in text
    assert "## Supported versions" in text
    assert not re.search(r"[\w.]+@[\w-]+\.\w+", text)
    for source in ("checkpoints", "bundles", "configurations", "archives"):
        assert f"**{source}" in text, "input that must never run as code"


@pytest.mark.parametrize("name", ["bug.yml", "feature.yml"])
def test_issue_forms_are_what_github_reads(name: str) -> None:
    form = load(TEMPLATES / name)
    assert {"name", "description", "body"} <= form.keys() <= {"name", "description", "body", "labels", "title"}
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert {field["type"] for field in fields} <= INPUTS
    ids = [field["id"] for field in fields]
    assert len(set(ids)) == len(ids)
    assert all(field["attributes"]["label"] for field in fields)
    assert any(field.get("validations", {}).get("required") for field in fields)


def test_the_issue_chooser_and_the_pull_request_template_are_there() -> None:
    assert load(TEMPLATES / "config.yml").keys() <= {"blank_issues_enabled", "contact_links"}
    assert "make test" in (ROOT / ".github" / "pull_request_template.md").read_text(encoding="utf-8")


def test_hooks_run_what_make_check_runs() -> None:
    repositories = {repository["repo"]: repository for repository in load(ROOT / ".pre-commit-config.yaml")["repos"]}
    hooks = {hook["id"]: hook for hook in repositories.pop("local")["hooks"]}
    check = (ROOT / "Makefile").read_text(encoding="utf-8").partition("\ncheck:")[2].partition("\n\n")[0]
    tools = {tuple(line.split()[:2]) for line in re.findall(r"\$\(BIN\)/(.*)", check)}
    ours = {tuple(hook["entry"].removeprefix(".venv/bin/").split()[:2]) for hook in hooks.values()}
    assert ours == tools == {("ruff", "check"), ("ruff", "format"), ("mypy",)}
    assert all(hook["entry"].startswith(".venv/bin/") and hook["language"] == "system" for hook in hooks.values())
    for repository in repositories.values():
        assert repository["rev"]
        assert {hook["id"] for hook in repository["hooks"]} >= {"check-yaml", "end-of-file-fixer", "trailing-whitespace"}


def test_every_tracked_text_passes_the_basic_hooks() -> None:
    """Hooks that would change files at the first commit of a newcomer."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    excluded = re.compile(load(ROOT / ".pre-commit-config.yaml")["exclude"])
    wrong = []
    for path in (ROOT / name for name in listed.decode().split("\0") if name and not excluded.match(name)):
        content = path.read_bytes() if path.is_file() else b""
        text = b"\0" not in content[:8000]
        if text and content and (not content.endswith(b"\n") or content.endswith(b"\n\n") or re.search(rb"[ \t]\n", content)):
            wrong.append(path.relative_to(ROOT).as_posix())
    assert wrong == []
