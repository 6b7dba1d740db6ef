"""Work directories, samples, routing files, snapshots, GGUF files and loads that cannot be used."""

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
    ("below a file", "file/work", text("file", ""), 2, ("is not a directory",)),
    ("a link to itself", "work", place("work", lambda path: path.symlink_to("work")), 2, ("work",)),
    ("read-only", "work", place("work", read_only), 4, ("Permission denied",)),
    ("below a read-only one", "parent/work", place("parent", read_only), 4, ("Permission denied",)),
    ("below /proc", "/proc/nowhere/work", text("x", ""), 4, ("/proc",)),
    ("a name of 300 characters", "w" * 300, text("x", ""), 2, ("too long",)),
    ("artifacts is a file", "work", text("work/artifacts", ""), 2, ("artifacts", "no directory")),
    (".store.json is a pipe", "work", place("work/artifacts/.store.json", fifo), 2, (".store.json", "schema_version")),
    (".store.json of version -1", "work", text("work/artifacts/.store.json", '{"schema_version": -1}'), 2, ("-1",)),
    ("sweep is a pipe", "work", place("work/sweep", fifo), 2, ("sweep", "no directory")),
    ("mlflow.db is a directory", "work", place("work/mlflow.db", lambda path: path.mkdir()), 2, ("mlflow.db", "no file")),
    ("summary.json is a pipe", "work", place("work/summary.json", fifo), 2, ("summary.json", "no file")),
    ("report.txt is a directory", "work", place("work/report.txt", lambda p: p.mkdir()), 2, ("report.txt", "no file")),
)

SUMMARIES: tuple[tuple[str, str | bytes], ...] = (
    ("no JSON", "{"),
    ("a list", "[]"),
    ("of another version", '{"schema_version": 99, "candidates": []}'),
    ("with a verdict of null", '{"schema_version": 1, "candidates": [{"verdict": null}]}'),
    ("with an unknown key", '{"schema_version": 1, "evil": 1}'),
    ("not UTF-8", b"\xff\xfe"),
    ("nested deep", NESTED),
)

LENGTHS = (
    ("tensorrt", "max_tokens"),
    ("tensorrt_rtx", "max_tokens"),
    ("trtllm", "max_seq_len"),
    ("vllm", "max_model_len"),
    ("sglang", "context_length"),
    ("llamacpp", "n_ctx"),
)
"""Backends whose engines are made for a number of tokens, as it ships more than the model's 2,048, with its key."""

LINE = {"prompt": "Copy: abc", "reference": "abc", "check": "exact"}


def changed(**changes: Any) -> str:
    return json.dumps(LINE | changes)


TOOL = {"check": "tool_call", "tools": [{"name": "f", "arguments": ["a"]}]}

SAMPLES: tuple[tuple[str, str | bytes, tuple[str, ...]], ...] = (
    ("an empty file", "", ("no samples",)),
    ("no JSON", "{", ("1:", "not one JSON value")),
    ("a list", "[]", ("1:", "array")),
    ("NaN", '{"prompt": NaN}', ("1:",)),
    ("nested deep", NESTED, ("1:",)),
    ("an integer of 5,000 digits", '{"prompt": "a", "reference": "b", "depth": ' + "9" * 5000 + "}", ("1:",)),
    ("an integer of 400 digits", '{"prompt": "a", "reference": "b", "depth": ' + "9" * 400 + "}", ("1:", "depth")),
    ("half a surrogate in the prompt", '{"prompt": "\\ud800", "reference": "b"}', ("1:",)),
    ("not UTF-8", b'{"prompt": "\xff"}', ("UTF-8",)),
    ("an unknown key", changed(promt="x"), ("promt", "unknown key")),
    ("no reference", '{"prompt": "a"}', ("reference", "missing")),
    ("an empty reference", changed(reference=""), ("reference",)),
    ("a reference as a number", changed(reference=3), ("reference",)),
    ("prompt and messages", changed(messages=[{"role": "user", "content": "x"}]), ("prompt", "messages")),
    ("an unknown role", json.dumps({"messages": [{"role": "root", "content": "x"}], "reference": "b"}), ("messages.0.role",)),
    ("messages as text", json.dumps({"messages": "x", "reference": "b"}), ("messages",)),
    ("an unknown check", changed(check="regex"), ("check",)),
    ("a depth beyond 1", changed(depth=2), ("depth",)),
    ("a workload with a slash", changed(workload="../x"), ("workload",)),
    ("a tool call without tools", changed(check="tool_call", reference="[]"), ("tools",)),
    ("a tool call of nothing", changed(**TOOL, reference="{}"), ("reference", "no call of one of the tools")),
    (
        "a tool call of another tool",
        changed(**TOOL, reference='{"name": "g", "arguments": {"a": 1}}'),
        ("reference", "no call of"),
    ),
    (
        "a tool call without an argument",
        changed(**TOOL, reference='{"name": "f", "arguments": {}}'),
        ("reference", "no call of"),
    ),
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
    ("blanks alone", '" "', ("no texts",)),
    ("no JSON", "abc", (":1:", "not JSON")),
    ("text as a number", '{"text": 3}', (":1:", "text")),
    ("not UTF-8", b'"\xff"', (":1:", "not UTF-8")),
)

SNAPSHOT = {"classes": {"chat": {
    "version": "1", "latency": {"good": 1, "of": 1, "limit_ms": 5.0}, "json_validity": None, "canaries": None,
    "memory": {"live_tokens": 1, "max_tokens": 2},
}}}  # fmt: skip


def snapshot(**changes: Any) -> str:
    return json.dumps({"classes": {"chat": SNAPSHOT["classes"]["chat"] | changes}})


SNAPSHOTS: tuple[tuple[str, str | bytes, tuple[str, ...]], ...] = (
    ("no JSON", "{", ("cannot be read",)),
    ("a list", "[]", ("object",)),
    ("no classes", '{"classes": {}}', ("classes",)),
    ("an integer of 5,000 digits", "9" * 5000, ("cannot be read",)),
    ("more good than all", snapshot(latency={"good": 2, "of": 1, "limit_ms": 5.0}), ("good=2",)),
    ("a limit of NaN", snapshot().replace("5.0", "NaN"), ("limit_ms",)),
    ("a negative count", snapshot(latency={"good": -1, "of": 1, "limit_ms": 5.0}), ("good",)),
    ("a version 0", snapshot(version="0"), ("version",)),
    ("a version as a number", snapshot(version=1), ("version", "got 1")),
    ("a count as a fraction", snapshot(canaries={"good": 0.5, "of": 4}), ("canaries.good",)),
    ("more live tokens than fit", snapshot(memory={"live_tokens": 2, "max_tokens": 1}), ("live_tokens=2",)),
    ("no tokens that fit", snapshot(memory={"live_tokens": 0, "max_tokens": 0}), ("max_tokens",)),
    ("a monitor that there is not", snapshot(throughput=3), ("classes.chat.throughput",)),
    ("a class without a monitor", '{"classes": {"chat": {"version": "1"}}}', ("classes.chat.latency", "required")),
    ("a time without its zone", json.dumps(SNAPSHOT | {"taken_at": "2026-01-01T00:00:00"}), ("taken_at", "timezone")),
    ("half a surrogate", snapshot(version="\ud800"), ("JSON",)),
    ("a class with a line break", json.dumps({"classes": {"a\n": SNAPSHOT["classes"]["chat"]}}), ("classes.a?",)),
)

BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "\n".join(
    f"{name}: &{name} [{','.join([f'*{before}'] * 9)}]" for before, name in pairwise("abcdefghi")
)
ROUTES: tuple[tuple[str, str | bytes, tuple[str, ...]], ...] = (
    ("empty", "", ("routes",)),
    ("a text", "hello", ("hello",)),
    ("a list", "- a", ("object",)),
    ("no YAML", "a: [", ("cannot be read",)),
    ("code", "routes: !!python/object/apply:os.system [id]", ("cannot be read",)),
    ("aliases that grow", BOMB, ("alias",)),
    ("nested deep", "[" * 3000, ("cannot be read",)),
    ("not UTF-8", b"\xff\xfe", ("cannot be read",)),
    ("a key twice", "routes: {}\nroutes: {}", ("cannot be read",)),
    ("an unknown key", "rutes: {}", ("rutes",)),
    ("a policy as a list", "routes: {chat: {policy: [a]}}", ("policy",)),
    ("a policy that is no number", "routes: {chat: {policy: .nan}}", ("routes.chat.policy", "got nan")),
    ("no policy", "routes: {chat: {fallback: a}}", ("routes.chat.policy", "required")),
    ("an unknown key of a route", "routes: {chat: {policy: a, fallbak: b}}", ("routes.chat.fallbak",)),
    ("a class that ends like a way back", "routes: {chat-previous: {policy: a}}", ("must not end with -previous",)),
    ("a class of two words", "routes: {'a b': {policy: a}}", ("routes.a b",)),
    ("a class default", "routes: {default: {policy: a}}", ("default",)),
)

GGUFS: tuple[tuple[str, bytes, tuple[str, ...]], ...] = (
    ("empty", b"", ("not a GGUF",)),
    ("version 1", b"GGUF" + struct.pack("<IQQ", 1, 0, 0), ("version 1",)),
    ("big-endian", b"GGUF" + struct.pack(">IQQ", 3, 0, 0), ("big-endian",)),
    ("2^63 tensors", b"GGUF" + struct.pack("<IQQ", 3, 1 << 63, 0), ("tensors",)),
    ("2^63 keys", b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 63), ("truncated",)),
    ("a key of 2^63 bytes", b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 63), ("bytes",)),
    ("no metadata", b"GGUF" + struct.pack("<IQQ", 3, 0, 0), ("general.architecture",)),
    ("a type that does not exist", b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"a" + struct.pack("<I", 99), ("type 99",)),
    (
        "arrays of arrays",
        b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"a" + struct.pack("<IIQ", 9, 9, 1),
        ("array of arrays",),
    ),
    (
        "a tensor without dimensions",
        b"GGUF" + struct.pack("<IQQQ", 3, 1, 0, 1) + b"a" + struct.pack("<IIQ", 0, 0, 0),
        ("tensor a has 0 dimensions",),
    ),
    ("a text that is not UTF-8", b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"\xff", ("not UTF-8",)),
)

IDENTITIES: tuple[tuple[str, str], ...] = (
    ("empty", ""),
    ("of nothing", "{}"),
    ("nested deep", NESTED),
)

LOADS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("workloads.load.context_tokens=1000000",), ("workloads.load.context_tokens=1000000", "32,768", "967,300 too many")),
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
      for key, more in (("workloads.jsonl", ()), ("calibration.jsonl", ()), ("routing.file", ("stage=route",)),
                        ("monitor.snapshot", ("stage=monitor",)))
      for what, make in (("a pipe", fifo), ("a directory", Path.mkdir), ("100 GB", sparse(100 << 30)))),
    *(Case(f"of nothing: stage={stage}", (f"stage={stage}", *more), (f"stage={stage}: nothing is registered",), prepare)
      for stage, more, prepare in (("rollback", (), text("x", "")), ("route", ("routing.rollback=chat",), text("x", "")),
                                   ("monitor", ("monitor.snapshot=s.json",), text("s.json", snapshot())))),
    *(Case(f"identity.json: {name}", ("stage=verify", "bundle=b"), ("b/identity.json", "stage=evaluate"),
           text("b/identity.json", content), begins=True) for name, content in IDENTITIES),
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
    *(Case(f"backend={backend} for more tokens than the model", (f"backend={backend}", "model.path=model"),
           (f"backend.{key}=", "the model was made for 2048 tokens", "set at most that"), with_config())
      for backend, key in LENGTHS),
    Case("a disk that is full", ("stage=capacity", "workdir=work"), ("work",), text("x", ""), code=4, file_bytes=4000,
         begins=True),
]  # fmt: skip
