"""Invalid work directories, samples, routing files, snapshots, GGUF files and loads."""

import json
import struct
from itertools import pairwise
from pathlib import Path
from typing import Any

from bad_input.case import Case
from bad_input.makers import Prepare, both, checkpoint, fifo, place, sparse, text, with_config, with_file, with_weights

NESTED = "[" * 100_000 + "]" * 100_000


def read_only(path: Path) -> None:
    path.mkdir()
    path.chmod(0o555)


WORKDIRS: tuple[tuple[str, str, Prepare, int, tuple[str, ...]], ...] = (
    ("a file", "work", text("work", ""), 2, ("is not a directory",)),
    ("a link to itself", "work", place("work", lambda path: path.symlink_to("work")), 2, ("work",)),
    ("read-only", "work", place("work", read_only), 4, ("Permission denied",)),
    ("a name of 300 characters", "w" * 300, text("x", ""), 2, ("too long",)),
    ("artifacts is a file", "work", text("work/artifacts", ""), 2, ("artifacts", "no directory")),
    (".store.json of version -1", "work", text("work/artifacts/.store.json", '{"schema_version": -1}'), 2, ("-1",)),
    ("mlflow.db is a directory", "work", place("work/mlflow.db", lambda path: path.mkdir()), 2, ("mlflow.db", "no file")),
)

SUMMARIES: tuple[tuple[str, str | bytes], ...] = (
    ("no JSON", "{"),
    ("of another version", '{"schema_version": 99, "candidates": []}'),
    ("with an unknown key", '{"schema_version": 1, "evil": 1}'),
)

LINE = {"prompt": "Copy: abc", "reference": "abc", "check": "exact"}


def changed(**changes: Any) -> str:
    return json.dumps(LINE | changes)


TOOL = {"check": "tool_call", "tools": [{"name": "f", "arguments": ["a"]}]}

SAMPLES: tuple[tuple[str, str | bytes, tuple[str, ...]], ...] = (
    ("an empty file", "", ("no samples",)),
    ("no JSON", "{", ("1:", "not one JSON value")),
    ("NaN", '{"prompt": NaN}', ("1:",)),
    ("an unknown key", changed(promt="x"), ("promt", "unknown key")),
    ("no reference", '{"prompt": "a"}', ("reference", "missing")),
    ("prompt and messages", changed(messages=[{"role": "user", "content": "x"}]), ("prompt", "messages")),
    ("an unknown role", json.dumps({"messages": [{"role": "root", "content": "x"}], "reference": "b"}), ("messages.0.role",)),
    ("a tool call without tools", changed(check="tool_call", reference="[]"), ("tools",)),
    ("a tool call of nothing", changed(**TOOL, reference="{}"), ("reference", "no call of one of the tools")),
    ("a reference that is no JSON", changed(check="json"), ("reference", "JSON")),
    ("an id of two lines", changed(id="a\nb"), ("1:", "id")),
    (
        "a tool twice",
        changed(
            check="tool_call", tools=[{"name": "f", "arguments": ["a"]}] * 2, reference='{"name": "f", "arguments": {"a": 1}}'
        ),
        ("tools",),
    ),
    ("an id twice", changed(id="a") + "\n" + changed(id="a"), ("2:", "id")),
    ("a key twice", '{"prompt": "a", "prompt": "b", "reference": "c"}', ("1:", "twice")),
)

TEXTS: tuple[tuple[str, str | bytes, tuple[str, ...]], ...] = (
    ("an empty file", "", ("no texts",)),
    ("no JSON", "abc", (":1:", "not JSON")),
)

SNAPSHOT = {"classes": {"chat": {
    "version": "1", "latency": {"good": 1, "of": 1, "limit_ms": 5.0}, "json_validity": None, "canaries": None,
    "memory": {"live_tokens": 1, "max_tokens": 2},
}}}  # fmt: skip


def snapshot(**changes: Any) -> str:
    return json.dumps({"classes": {"chat": SNAPSHOT["classes"]["chat"] | changes}})


SNAPSHOTS: tuple[tuple[str, str | bytes, tuple[str, ...]], ...] = (
    ("no JSON", "{", ("cannot be read",)),
    ("no classes", '{"classes": {}}', ("classes",)),
    ("more good than all", snapshot(latency={"good": 2, "of": 1, "limit_ms": 5.0}), ("good=2",)),
    ("a version 0", snapshot(version="0"), ("version",)),
    ("more live tokens than fit", snapshot(memory={"live_tokens": 2, "max_tokens": 1}), ("live_tokens=2",)),
    ("a monitor that there is not", snapshot(throughput=3), ("classes.chat.throughput",)),
    ("a time without its zone", json.dumps(SNAPSHOT | {"taken_at": "2026-01-01T00:00:00"}), ("taken_at", "timezone")),
    ("a class with a line break", json.dumps({"classes": {"a\n": SNAPSHOT["classes"]["chat"]}}), ("classes.a?",)),
)

BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "\n".join(
    f"{name}: &{name} [{','.join([f'*{before}'] * 9)}]" for before, name in pairwise("abcdefghi")
)
ROUTES: tuple[tuple[str, str | bytes, tuple[str, ...]], ...] = (
    ("aliases that grow", BOMB, ("alias",)),
    ("a key twice", "routes: {}\nroutes: {}", ("cannot be read",)),
    ("an unknown key", "rutes: {}", ("rutes",)),
    ("a policy that is no number", "routes: {chat: {policy: .nan}}", ("routes.chat.policy", "got nan")),
    ("a class that ends like a way back", "routes: {chat-previous: {policy: a}}", ("must not end with -previous",)),
    ("a class default", "routes: {default: {policy: a}}", ("default",)),
)

GGUFS: tuple[tuple[str, bytes, tuple[str, ...]], ...] = (
    ("version 1", b"GGUF" + struct.pack("<IQQ", 1, 0, 0), ("version 1",)),
    ("2^63 tensors", b"GGUF" + struct.pack("<IQQ", 3, 1 << 63, 0), ("tensors",)),
    ("no metadata", b"GGUF" + struct.pack("<IQQ", 3, 0, 0), ("general.architecture",)),
    ("a type that does not exist", b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"a" + struct.pack("<I", 99), ("type 99",)),
    (
        "a tensor without dimensions",
        b"GGUF" + struct.pack("<IQQQ", 3, 1, 0, 1) + b"a" + struct.pack("<IIQ", 0, 0, 0),
        ("tensor a has 0 dimensions",),
    ),
)

LOADS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("workloads.load.context_tokens=1000000",), ("workloads.load.context_tokens=1000000", "32,768", "too many")),
    (("workloads.load.batch=4096", "workloads.load.context_tokens=30000"), ("workloads.load.batch=4096", "are missing")),
)  # fmt: skip

LONG = json.dumps({"prompt": "a b " * 60_000, "reference": "c"})

CASES = [
    *(Case(f"workdir: {name}", ("stage=build", f"workdir={given}"), ("workdir", *says), prepare, code=code, unprivileged=True)
      for name, given, prepare, code, says in WORKDIRS),
    *(Case(f"summary.json: {name}", ("stage=build",), ("summary.json",), text("work/summary.json", content))
      for name, content in SUMMARIES),
    *(Case(f"workloads.jsonl: {name}", ("workloads=jsonl", "workloads.jsonl=s.jsonl"), ("s.jsonl", *says),
           text("s.jsonl", content)) for name, content, says in SAMPLES),
    *(Case(f"calibration.jsonl: {name}", ("calibration.jsonl=c.jsonl",), ("calibration.jsonl=c.jsonl", *says),
           text("c.jsonl", content)) for name, content, says in TEXTS),
    *(Case(f"monitor.snapshot: {name}", ("stage=monitor", "monitor.snapshot=s.json"), ("monitor.snapshot=s.json", *says),
           text("s.json", content)) for name, content, says in SNAPSHOTS),
    *(Case(f"routing.file: {name}", ("stage=route", "routing.file=r.yaml"), ("routing.file=r.yaml", *says),
           text("r.yaml", content)) for name, content, says in ROUTES),
    *(Case(f"GGUF: {name}", ("stage=build", "model.path=m.gguf"), ("model.path=", "m.gguf", *says), text("m.gguf", content))
      for name, content, says in GGUFS),
    *(Case(" ".join(arguments), arguments, says) for arguments, says in LOADS),
    *(Case(f"{key}: {what}", (f"{key}=x", *more), (f"{key}=x",), place("x", make))
      for key, more in (("workloads.jsonl", ()), ("routing.file", ("stage=route",)))
      for what, make in (("a pipe", fifo), ("a directory", Path.mkdir), ("100 GB", sparse(100 << 30)))),
    Case("of nothing: stage=rollback", ("stage=rollback",), ("stage=rollback: nothing is registered",)),
    Case("identity.json: of nothing", ("stage=verify", "bundle=b"), ("b/identity.json", "stage=evaluate"),
         text("b/identity.json", "{}"), begins=True),
    Case("stage=promote without candidates", ("stage=promote",), ("stage=promote: no candidates", "run stage=evaluate"),
         begins=True),
    Case("a prompt of 9 MB", ("workloads=jsonl", "workloads.jsonl=s.jsonl"), ("sample s-0001", "bytes", "give less"),
         text("s.jsonl", changed(prompt="a" * 9_000_000)), loads_model=True),
    Case("a directory that begins like a user", ("stage=build", "model.path='~x'"), ("model.path", "begins with a user"),
         place("~x/config.json", lambda path: path.write_text("{}"))),
    Case("a directory that may not be searched", ("stage=build", "model.path=model"), ("config.json", "Permission denied"),
         place("model", lambda path: checkpoint(path).chmod(0o444)), unprivileged=True),
    Case("a lock that may not be read", ("stage=prune", "prune.apply=true"), ("work/artifacts/.lock", "may not be written to"),
         place("work/artifacts/.lock", lambda path: path.touch(0)), begins=True, unprivileged=True),
    Case("a draft without weights", ("stage=evaluate", "workloads.speculation={draft:model}"),
         ("workloads.speculation.draft=", "model.safetensors", "download it again"), with_file("model.safetensors", "x"),
         loads_model=True),
    Case("a draft with NaN", ("stage=evaluate", "workloads.speculation={draft:model}"),
         ("workloads.speculation.draft=", "model.safetensors", "NaN"),
         with_weights(data=lambda zeros: zeros[:-4] + b"\0\0\xc0\x7f"), loads_model=True),
    Case("GGUF: a pipe", ("stage=build", "model.path=m.gguf"), ("model.path=", "m.gguf"), place("m.gguf", fifo)),
    Case("a prompt longer than the context", ("workloads=jsonl", "workloads.jsonl=s.jsonl", "model.path=model"),
         ("sample s-0001", "2,048", "too many"), both(lambda d: checkpoint(d / "model"), text("s.jsonl", LONG)),
         loads_model=True),
    Case("more tokens than the model", ("backend=vllm", "model.path=model"),
         ("backend.max_model_len=", "the model was made for 2048 tokens", "set at most that"), with_config()),
    Case("a disk that is full", ("stage=capacity", "workdir=work"), ("work",), text("x", ""), code=4, file_bytes=4000,
         begins=True),
]  # fmt: skip
