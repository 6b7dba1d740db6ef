"""Every override that a message suggests is one that kvgate accepts, and every key that one names exists."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from amount import STRIDE
from suggestions import HOLE, KEYS, ROOTS, arguments, filled, problems, renamed, suggested

ROOT = Path(__file__).resolve().parents[2]
ERRORS = {"UserError", "MissingRequirement", "GateRefusal", "Unreadable"}
FILES = re.compile(r"\.(?:py|json|jsonl|yaml|yml|txt|safetensors|onnx|gguf|pem|png|db|h|md)$")


def text_of(node: ast.AST) -> str | None:
    """The text of a string, with holes where a run fills something in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else HOLE for part in node.values)
    return None


def strings(tree: ast.AST) -> Iterator[str]:
    """Every string of a source that is no docstring, whole f-strings as one."""
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        text = text_of(node) if id(node) not in inside | documentation else None
        if text is not None:
            yield text


@cache
def sources() -> dict[Path, ast.AST]:
    paths = (path for room in ("pipeline", "stages") for path in (ROOT / room).rglob("*.py"))
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in paths}


@cache
def suggestions() -> dict[str, Path]:
    """What messages suggest, and where."""
    messages = {text: path for path, tree in sources().items() for text in strings(tree)}
    return {filled(one): path for text, path in messages.items() for one in [*suggested(text), *arguments(text)]}


def test_messages_suggest_overrides() -> None:
    assert len(suggestions()) > 50
    assert {"promote.accept_broken_log=true", "gates.attempt=1", "backend.attention=graph"} <= suggestions().keys()
    assert {"prune.apply=true", "promote.name=fp8", "workloads.bfcl.samples=1", "backend.device=cpu"} <= suggestions().keys()


def test_suggested_overrides_are_accepted() -> None:
    some = list(suggestions().items())[::STRIDE]
    refused = {override: (found, path) for override, path in some if (found := problems(override))}
    assert refused == {}


def test_what_nobody_would_accept_is_seen() -> None:
    (found,) = suggested(f"seed={HOLE}: no; give kv.sink_tokns=4")
    assert problems(found)
    assert problems("kv=fp9")
    assert problems("backend.threads=0")


OTHERS = {"model.scaling", "model.layers.0.self_attn", "model.save_pretrained"}
"""Names of other libraries that begin as a key of ours would."""


def known(name: str) -> bool:
    """Whether a name is a key, or one of a table by kind of work."""
    return name in KEYS | OTHERS or name.rpartition(".")[0] in ("workloads.samples", "gates.margins")


def test_keys_that_errors_name_exist() -> None:
    unknown = set()
    for path, tree in sources().items():
        for call in ast.walk(tree):
            if isinstance(call, ast.Call) and getattr(call.func, "id", None) in ERRORS:
                for text in (text for argument in call.args for text in strings(argument)):
                    for name in re.findall(r"(?<![\w./-])[a-z_]+(?:\.[a-z_0-9]+)+(?![\w./(*])", text):
                        if name.partition(".")[0] in ROOTS and not FILES.search(name) and not known(name):
                            unknown.add(f"{path.relative_to(ROOT)}: {name}")
    assert unknown == set()


def test_a_name_that_is_offered_for_a_misspelt_key_is_one() -> None:
    assert renamed("kv.value.group: unknown key, did you mean group_size?") == ["kv.value.group_size"]
