"""Writes docs/reference.md from the code: `python docs/reference.py`."""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from pydantic import BaseModel

from pipeline.config import CONF
from pipeline.config import compose as _options  # noqa: F401 - the import registers options that are not files
from pipeline.config.config import Config
from stages.engines.config import backend_configs
from stages.policies.policy import KVPolicy, KVShape

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference.md"
SHAPE = KVShape(layers=32, kv_heads=8, head_dim=128)
"""Llama-3-8B's, for which the table of policies counts bytes."""
RECORDS = {
    "of a work directory": {
        "pipeline.registry.summary.FILE": "the last evaluation, for programs: candidates, checks, exit code (null: not ended)",
        "pipeline.chain.showing.PAGE": "charts, and the answers that changed, on one page for people",
        "pipeline.registry.summary.FOLDER": "folder with the summary and the page of every sweep",
        "pipeline.registry.summary.JUNIT": "the verdicts for a CI system: a test for each candidate",
        "stages.core.files.STORE_FILE": "the version of the store's layout, in `artifacts/`",
        "pipeline.chain.planning.CAPACITY": "the memory and the requests of every policy, by `stage=capacity`",
        "pipeline.chain.planning.RECOMMENDATION": "the policies with evidence for a use, by `stage=recommend`",
    },
    "of an engine": {
        "stages.engines.bundle.BUNDLE_FILE": "the engine's sources, target device and limits",
        "stages.policies.policy.POLICY_FILE": "the KV policy",
        "stages.policies.scales.SCALES_FILE": "the static scales",
        "stages.engines.vllm.backend.ENGINE_ARGS_FILE": "arguments for `vllm serve` of the judged engine",
        "stages.engines.trtllm.build.LLM_ARGS_FILE": "arguments for `trtllm-serve` of the judged engine",
        "stages.engines.sglang.backend.COMMAND_FILE": "the command that serves the judged engine with SGLang or llama.cpp",
    },
    "of the evidence": {
        "pipeline.evidence.identity.IDENTITY_FILE": "the digests of everything that the verdict depends on",
        "stages.verdict.report.REPORT_FILE": "every number of the evaluation, with units in the names",
        "stages.verdict.report.SAMPLES_FILE": "a row per sample: both answers, both probabilities, distances",
        "pipeline.config.signing.SIGNATURE_FILE": "the signature of `identity.json`: a Sigstore bundle",
    },
}
"""Constant with the name of a file -> description of the file, for every file that people or programs read."""


def models(annotation: object) -> list[type[BaseModel]]:
    """Return the records that a field may hold, in their order."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for inner in get_args(annotation) for model in models(inner)]


def docstrings(model: type[BaseModel]) -> dict[str, str]:
    """Return the docstring below each field of a record and of its bases, in one line each."""
    found: dict[str, str] = {}
    for cls in reversed(model.__mro__):
        if not issubclass(cls, BaseModel) or cls is BaseModel or cls.__module__ == "stages.core.strict":
            continue
        try:
            (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
        except (OSError, TypeError):  # made by create_model, whose bases have the text
            continue
        assert isinstance(tree, ast.ClassDef)
        for field, text in zip(tree.body, tree.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
                found[field.target.id] = " ".join(ast.literal_eval(text.value).split())
    return found


def comments(path: Path) -> dict[str, str]:
    """Return the comments above keys of a file of conf/, by the key's last name; the file's first comment is left out."""
    found: dict[str, str] = {}
    above: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.strip().startswith("#"):
            above.append(line.strip()[1:].strip())
            continue
        if above and (key := re.match(r"\s*(\w+):", line)):
            found[key[1]] = " ".join(above)
        above = []
    return {key: said for key, said in found.items() if said != first_comment(path)}


def values(annotation: object, metadata: tuple[object, ...] = ()) -> str:
    """Return a description of a key's allowed values."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return values(arguments[0], (*arguments[1:], *metadata))
    said = "text"
    if origin is Literal:
        said = ", ".join(f"`{one}`" for one in arguments)
    elif origin in (Union, UnionType):
        said = ", ".join(dict.fromkeys("`null`" if one is type(None) else values(one, metadata) for one in arguments))
    elif origin in (list, tuple):
        said = f"list of {values(arguments[0])}"
    elif origin is dict:
        said = f"{values(arguments[1])} by name"
    elif annotation is bool:
        said = "`true`, `false`"
    elif annotation in (int, float):
        said = _range("integer" if annotation is int else "number", metadata)
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        said = "keys"
    return said


def _range(kind: str, metadata: tuple[object, ...]) -> str:
    parts = [part for one in metadata for part in (one, *getattr(one, "metadata", ()))]
    said = [kind]
    for name, word in {"ge": "from", "gt": "above", "le": "to", "lt": "below"}.items():
        limits = [getattr(part, name) for part in parts if getattr(part, name, None) is not None]
        said += [f"{word} {int(limit) if limit == int(limit) else limit:,}" for limit in limits[-1:]]
    return " ".join(said)


def rows(
    model: type[BaseModel], defaults: Any, prefix: str, said: dict[str, str], seen: dict[type[BaseModel], str] | None = None
) -> Iterator[tuple[str, ...]]:
    """Yield key, default, values and meaning of every key of a record; a record that came before is referred to."""
    own, seen = docstrings(model), {} if seen is None else seen
    for name, field in model.model_fields.items():
        key = f"{prefix}{name}"
        annotation: Any = Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
        inner = [one for one in models(field.annotation) if one is not model]
        least = None if field.is_required() else field.get_default(call_default_factory=True)
        default = defaults.get(name, least) if isinstance(defaults, dict) else least
        about = linked(own.get(name) or said.get(name, ""))
        if not inner or get_origin(field.annotation) in (list, tuple):
            allowed = values(annotation)
            # A validator may replace null by a number, so that the field's own type lacks null.
            replaced = "null" not in allowed and re.search(r"\bnull\b", about)
            yield f"`{key}`", _yaml(default), f"{allowed}, `null`" if replaced else allowed, about
        elif inner[0] in seen:
            yield f"`{key}`", "`null`" if default is None else "", f"the keys of `{seen[inner[0]]}`", about
        else:
            seen[inner[0]] = key
            if default is None:
                yield f"`{key}`", "`null`", "`null`, or the keys below", about or " ".join((inner[0].__doc__ or "").split())
            yield from rows(inner[0], default, f"{key}.", said, seen)


def linked(text: str) -> str:
    """Return a text of the code for the page: names of pages become links, and None becomes null."""
    return re.sub(r"docs/([\w-]+)\.md(#[\w-]+)?", r"[\1](\1.md\2)", re.sub(r"\bNone\b", "null", text))


def _yaml(value: object) -> str:
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json")
    if isinstance(value, tuple):
        value = list(value)
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000).replace("\n...", "").strip()
    return f"`{text}`"


def table(heads: tuple[str, ...], lines: Sequence[tuple[str, ...]]) -> list[str]:
    """Return a table in Markdown."""
    cells = [tuple(cell.replace("|", "\\|") for cell in line) for line in (heads, tuple("---" for _ in heads), *lines)]
    return [f"| {' | '.join(line)} |" for line in cells] + [""]


def composed(*overrides: str) -> dict[str, Any]:
    """Return the configuration with its defaults; values that depend on this machine or its environment are not resolved."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        found = compose("config", overrides=list(overrides))
    plain = OmegaConf.to_container(found)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def first_comment(path: Path) -> str:
    """Return the comment at the beginning of a file of conf/ as one line."""
    lines = path.read_text(encoding="utf-8").splitlines()
    some = [line for line in lines if not line.startswith("# @")]
    end = next((number for number, line in enumerate(some) if not line.startswith("#")), len(some))
    return " ".join(line[1:].strip() for line in some[:end])


def keys() -> list[str]:
    """Return the tables of all keys."""
    whole, own = composed(), comments(CONF / "config.yaml")
    lines = ["## Keys", ""]
    lines += ["`GROUP=OPTION` chooses a file of `conf/`. `GROUP.KEY=VALUE` overrides one key.", ""]
    said, plain = docstrings(Config), []
    groups = []
    for name, field in Config.model_fields.items():
        if not (inner := models(field.annotation)):
            plain.append(
                (f"`{name}`", _yaml(whole[name]), values(field.annotation), linked(said.get(name) or own.get(name, "")))
            )
        elif name != "backend":
            groups.append((name, inner[0]))
    lines += ["### Of the command", "", *table(("key", "default", "values", "meaning"), plain)]
    for name, model in groups:
        above = {key: said for file in sorted((CONF / name).glob("*.yaml")) for key, said in comments(file).items()}
        found = rows(model, whole[name], f"{name}.", above)
        lines += [f"### {name}", "", " ".join((model.__doc__ or "").split()), ""]
        if name == "workloads":  # the tiny model is asked other questions than all other models
            chat = rows(model, composed("workloads=chat")[name], f"{name}.", above)
            found = ((key, tiny, other, *rest) for (key, tiny, *rest), (_, other, *_) in zip(found, chat, strict=True))
            lines += table(("key", "default, tiny model", "default, other models (`chat`)", "values", "meaning"), list(found))
        else:
            lines += table(("key", "default", "values", "meaning"), list(found))
    for name, model in sorted(backend_configs().items()):
        above = comments(CONF / "backend" / f"{name}.yaml")
        found = rows(model, composed(f"backend={name}")["backend"], "backend.", above)
        lines += [f"### backend={name}", "", " ".join((model.__doc__ or "").split()), ""]
        lines += table(("key", "default", "values", "meaning"), [row for row in found if row[0] != "`backend.name`"])
    return lines


def groups() -> list[str]:
    """Return the options of every group, described by the first comment of their files."""
    files = [path for path in sorted(CONF.glob("*/*.yaml")) if path.parent.name != "kv"]
    some = [(f"`{path.parent.name}={path.stem}`", linked(first_comment(path))) for path in files]
    return ["## Groups and options", "", "`kv=` has a [table of its own](#policies).", "", *table(("option", "meaning"), some)]


def policies() -> list[str]:
    """Return the table of the policies of conf/kv, with the bytes of Llama-3-8B's shape by their own arithmetic."""
    lines = []
    for path in sorted((CONF / "kv").glob("*.yaml")):
        policy = KVPolicy.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
        lines.append((f"`{path.stem}`", first_comment(path), f"{policy.bytes_per_token(SHAPE) / 1024:.4g}"))
    lines.sort(key=lambda line: -float(line[2]))
    head = "KiB per token for 32 layers and 8 KV heads of 128 channels (Llama-3-8B), without windows and exact tokens."
    return ["## Policies", "", head, "", *table(("`kv=`", "stored cache", "KiB per token"), lines)]


def files() -> list[str]:
    """Return the tables of the files that people and programs read."""
    lines = ["## Files", ""]
    for title, some in RECORDS.items():
        named = [
            (getattr(import_module(place.rpartition(".")[0]), place.rpartition(".")[2]), what) for place, what in some.items()
        ]
        lines += [f"### Files {title}", "", *table(("file", "content"), [(f"`{name}`", what) for name, what in named])]
    return lines


def page() -> str:
    """Return docs/reference.md."""
    head = [
        "# Reference",
        "",
        "All policies, files, options and keys of kvgate, written from the code by `python docs/reference.py`. "
        "[Start](start.md#exit-codes) has the exit codes.",
        "",
    ]
    parts = [*head, *policies(), *files(), *groups(), *keys()]
    return "\n".join(parts).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
