"""The identity of a judged engine: `identity.json`, which binds everything that made it and everything said of it.

It holds the manifests of the whole chain of artifacts (what each was made from, by which code and libraries, on which
hardware, and the digest of every file), the gates and the verdict. A manifest's key is the digest of its parts, and a part
names the digests of its inputs, so that the chain is closed: no member can be exchanged without being noticed by the next.
`binds` repeats what people ask for by name. `pipeline.run.verify` replays all of it.
"""

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import ValidationError

from pipeline import __version__
from pipeline.artifacts.digest import files_digest, json_digest
from pipeline.artifacts.store import Artifact, Recipe
from pipeline.config.config import Config
from pipeline.core.errors import UserError
from pipeline.core.kv import POLICY_FILE, SCALES_FILE
from pipeline.core.strict import StrictModel
from pipeline.verdict.report import REPORT_FILE, SAMPLES_FILE, EvaluationReport
from pipeline.verdict.thresholds import Gates, Verdict

IDENTITY_FILE = "identity.json"
BUNDLE_FILE = "bundle.json"

Role = Literal["calibration", "quantized", "engine", "baseline", "answers", "evaluation"]
ROLES: tuple[Role, ...] = get_args(Role)


PARTS: dict[str, type] = {"stage": str, "config": dict, "inputs": dict, "libraries": dict}
"""What of an artifact's parts is read here."""
TEXTS = ("inputs", "libraries")
"""Those of them that are texts by name."""

# An identity may come from anyone. These become paths, which must stay in the store and beside the identity.
STAGE = re.compile("[a-z_]+")
KEY = re.compile("[0-9a-f]{64}")
WORKLOADS_FILE = re.compile(r"workloads/(?!\.{1,2}$)[^/\0]+")


class Link(StrictModel):
    """An artifact of the chain: its manifest."""

    title: str
    key: str
    digest: str
    parts: dict[str, Any]
    """What decided its bytes: stage, config, inputs, code, libraries, hardware."""
    files: dict[str, str]
    """Relative path -> sha256."""

    @classmethod
    def of(cls, title: str, artifact: Artifact) -> "Link":
        return cls(title=title, key=artifact.key, digest=artifact.digest, parts=artifact.parts, files=artifact.files)

    @property
    def inputs(self) -> dict[str, str]:
        return dict(self.parts["inputs"])

    @property
    def place(self) -> str:
        """Its directory below a store's root."""
        return Recipe.place(self.parts["stage"], self.key)

    def provides(self) -> set[str]:
        """Every digest by which an artifact after it may name it: whole, a folder of it, a file of it."""
        folders = {path.partition("/")[0] for path in self.files if "/" in path}
        return {self.digest, *self.files.values(), *(files_digest(self.files, folder) for folder in folders)}


class Identity(StrictModel):
    """`identity.json`."""

    schema_version: Literal[1]
    kvgate: str
    model: str
    """The checkpoint's short name."""
    policy: str
    backend: str
    chain: list[Link]
    """In the order of making."""
    roles: dict[Role, str]
    """Role -> key of the artifact of the chain that has it."""
    workloads_file: str | None
    """The user's own samples, relative to this file; null when all are generated."""
    gates: Gates
    verdict: Verdict
    binds: dict[str, str]

    def link(self, role: Role) -> Link:
        return next(link for link in self.chain if link.key == self.roles[role])


def read_identity(path: Path) -> Identity:
    """Raises UserError when the file is not an identity, or one that names files elsewhere; its first problem is named."""
    try:
        identity = Identity.model_validate_json(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"{path}: {'.'.join(map(str, first['loc'])) or 'the file'}: {first['msg']}") from None
    for link in identity.chain:
        problem = _problem(link)
        if problem is not None:
            raise UserError(f"{path}: chain: {link.title}: {problem}")
    if identity.workloads_file is not None and not WORKLOADS_FILE.fullmatch(identity.workloads_file):
        raise UserError(f"{path}: workloads_file: must be null or workloads/NAME, a file beside this one")
    lost = [role for role in ROLES if identity.roles.get(role) not in {link.key for link in identity.chain}]
    if lost:
        raise UserError(f"{path}: roles.{lost[0]}: names no artifact of the chain")
    return identity


def _problem(link: Link) -> str | None:
    """What in a link of the chain cannot be read or cannot be used, None when all can."""
    for name, kind in PARTS.items():
        if not isinstance(link.parts.get(name), kind):
            return f"parts.{name} is missing or no {kind.__name__}"
    for name in TEXTS:
        for key, value in link.parts[name].items():
            if not isinstance(value, str):
                return f"parts.{name}.{key} is no text"
    if not STAGE.fullmatch(link.parts["stage"]):
        return "parts.stage must be lower-case letters and _"
    if not KEY.fullmatch(link.key):
        return "key must be a sha256, 64 hexadecimal digits"
    try:
        json_digest(link.parts)
    except ValueError:  # NaN and infinity, which JSON parsers let through
        return "parts holds a number that JSON has no form for"
    return None


def make_identity(
    config: Config,
    chain: Sequence[Link],
    roles: Mapping[Role, str],
    engine: Path,
    *,
    report: EvaluationReport,
    verdict: Verdict,
) -> Identity:
    """The identity of the bundle in `engine`, as `report` and `verdict` judge it."""
    asked = config.workloads.file
    unbound = Identity(
        schema_version=1,
        kvgate=__version__,
        model=config.model.label,
        policy=config.kv.name,
        backend=config.backend.name,
        chain=list(chain),
        roles=dict(roles),
        # the same name: samples without an id are named after their file
        workloads_file=f"workloads/{asked.name}" if asked is not None else None,
        gates=config.gates,
        verdict=verdict,
        binds={},
    )
    return unbound.model_copy(update={"binds": binds(unbound, read_bundle(engine), report)})


def write_identity(identity: Identity, evaluation: Path, workloads: Path | None, out: Path) -> None:
    """Fill `out` with the identity and the evidence that its replay reads."""
    for name in (REPORT_FILE, SAMPLES_FILE):
        shutil.copyfile(evaluation / name, out / name)
    if workloads is not None:
        copy = out / str(identity.workloads_file)
        copy.parent.mkdir()
        shutil.copyfile(workloads, copy)
    (out / IDENTITY_FILE).write_text(identity.model_dump_json(indent=1) + "\n", encoding="utf-8")


def read_bundle(engine: Path) -> dict[str, Any]:
    """`bundle.json` of any backend, unchecked; UserError when it is no JSON object."""
    path = engine / BUNDLE_FILE
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from error
    if not isinstance(record, dict):
        raise UserError(f"{path}: must hold a JSON object")
    return record


def binds(identity: Identity, record: Mapping[str, Any], report: EvaluationReport) -> dict[str, str]:
    """What the identity binds, by name: digests, versions, and the verdict."""
    quantized, engine, evaluation = (identity.link(role) for role in ("quantized", "engine", "evaluation"))
    bound = {
        "checkpoint": quantized.inputs["checkpoint"],
        "weights": files_digest(quantized.files, "checkpoint"),
        "recipe": json_digest(quantized.parts["config"]),
        "kv policy": engine.files[POLICY_FILE],
        "scales": engine.files[SCALES_FILE],
        "calibration texts": identity.link("calibration").digest,
        "samples": report.workloads_digest,
    }
    if "graph_digest" in record:
        bound["graph"] = record["graph_digest"]
    for name, digest in sorted(record.get("plugins", {}).items()):
        bound[f"plugin {name}"] = digest
    if "built_for" in record:
        built = record["built_for"]
        bound["built for"] = f"{built['library']} {built['version']}, SM {', '.join(built['compute_capabilities'])}"
    for name, versions in sorted(_libraries(identity.chain).items()):
        bound[f"library {name}"] = ", ".join(versions)
    machine = evaluation.parts["hardware"]
    bound["processor"] = f"{machine['cpu']}, {machine['cores']} cores, {machine['machine']}"
    gpus = [" ".join(f"{name}={value}" for name, value in sorted(gpu.items())) for gpu in machine["gpus"]]
    bound["gpus"] = "; ".join(gpus) or "none"
    bound |= {"engine": engine.digest, "baseline": identity.link("baseline").digest}
    bound["report"] = files_digest({name: evaluation.files[name] for name in (REPORT_FILE, SAMPLES_FILE)})
    return bound | {"gates": json_digest(identity.gates.model_dump(mode="json")), "verdict": identity.verdict.status}


def _libraries(chain: Sequence[Link]) -> dict[str, list[str]]:
    found: dict[str, set[str]] = {}
    for link in chain:
        for name, version in link.parts["libraries"].items():
            found.setdefault(name, set()).add(version)
    return {name: sorted(versions) for name, versions in found.items()}
