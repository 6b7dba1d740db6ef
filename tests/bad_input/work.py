"""Invalid work directories, samples, routes, snapshots, GGUF files and loads."""

import json
import os
import struct
from pathlib import Path
from typing import Any

from bad_input.forks import BadInput
from bad_input.makers import LFS, Prepare, checkpoint, sparse_file, text_file, with_config, with_file, with_path


def read_only(path: Path) -> None:
    path.mkdir()
    path.chmod(0o555)


WORKDIRS: tuple[tuple[str, str, Prepare, int, tuple[str, ...]], ...] = (
    ("a file", "work", text_file("work", ""), 2, ("is not a directory",)),
    ("read-only", "work", with_path("work", read_only), 4, ("cannot be written to",)),
    ("artifacts is a file", "work", text_file("work/artifacts", ""), 2, ("artifacts", "not a directory")),
    (
        ".store.json of version -1",
        "work",
        text_file("work/artifacts/.store.json", '{"schema_version": -1}'),
        2,
        ("another version",),
    ),
    ("mlflow.db is a directory", "work", with_path("work/mlflow.db", Path.mkdir), 2, ("mlflow.db", "not a file")),
)

LINE = {"prompt": "Copy: abc", "reference": "abc", "check": "exact"}


def sample_line(**changes: Any) -> str:
    """Return a line of workloads.jsonl with changed keys."""
    return json.dumps(LINE | changes)


TOOL = {"check": "tool_call", "tools": [{"name": "f", "arguments": ["a"]}]}

SAMPLES: tuple[tuple[str, str | bytes, tuple[str, ...]], ...] = (
    ("a JSON array", '[\n{"prompt": "a", "reference": "b"}\n]', (":1: line: not one JSON value", "write one JSON object on")),
    ("no reference", '{"prompt": "a"}', ("reference", "missing")),
    (
        "an empty question",
        json.dumps({"messages": [{"role": "user", "content": " "}], "reference": "a"}),
        ("messages", "the last one is empty"),
    ),
    ("prompt and messages", sample_line(messages=[{"role": "user", "content": "x"}]), ("prompt", "messages")),
    ("an empty tool call", sample_line(**TOOL, reference="{}"), ("reference", "of one of the tools")),
    ("a reference that is no JSON", sample_line(check="json"), ("reference", "JSON")),
    ("tools that no check reads", sample_line(tools=TOOL["tools"]), ("tools", "exact", "leave them out")),
    ("half of a surrogate pair", '{"prompt": "a", "reference": "\\ud83d"}', ("1:", "line:", "invalid JSON")),
    (
        "commas after the objects",
        f"{sample_line()},\n{sample_line(prompt='x')},",
        (":1: line: not one", "(also in 1 more line)"),
    ),
    ("a duplicate id", sample_line(id="a") + "\n" + sample_line(id="a"), ("2:", "id")),
)

TEXTS: tuple[tuple[str, str | bytes, tuple[str, ...]], ...] = (
    ("an empty file", "", ("no texts",)),
    ("no JSON", "abc", (":1:", "not JSON")),
    ("gzip", b"\x1f\x8b\x08\x00", (":1:", "not UTF-8")),
)

TAKEN = {"taken_at": "2026-01-01T00:00:00Z"}
SNAPSHOT = {"classes": {"chat": {
    "version": "1", "latency": {"good": 1, "of": 1, "limit_ms": 5.0}, "json_validity": None, "canaries": None,
    "memory": {"live_tokens": 1, "max_tokens": 2},
}}}  # fmt: skip


def snapshot(**changes: Any) -> str:
    return json.dumps(TAKEN | {"classes": {"chat": SNAPSHOT["classes"]["chat"] | changes}})


SNAPSHOTS: tuple[tuple[str, str | bytes, tuple[str, ...]], ...] = (
    ("a duplicate key", '{"classes": {}, "classes": {}}', ("a key occurs twice",)),
    ("more good requests than requests", snapshot(latency={"good": 2, "of": 1, "limit_ms": 5.0}), ("good=2",)),
    ("no time", json.dumps(SNAPSHOT), ("taken_at: Field required",)),
    ("a time without a timezone", json.dumps(SNAPSHOT | {"taken_at": "2026-01-01T00:00:00"}), ("taken_at", "timezone")),
)

LOADS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("workloads.lengths=[2048]", "workloads.length_documents=8"), ("workloads.length_documents=8", "give at least")),
    (("workloads.load.context_tokens=1000000",), ("workloads.load.context_tokens=1000000", "32,768", "too many")),
    (("workloads.load.batch=4096", "workloads.load.context_tokens=30000"),
     ("context_tokens=30000: with 4096", "are missing", "or lower workloads.load.batch")),
)  # fmt: skip


def long_prompt(directory: Path) -> None:
    checkpoint(directory / "model")
    (directory / "s.jsonl").write_text(json.dumps({"prompt": "a b " * 60_000, "reference": "c"}))


CASES = [
    *(BadInput(f"workdir: {name}", ("stage=build", f"workdir={path}"), ("workdir", *expected), prepare, code, unprivileged=True)
      for name, path, prepare, code, expected in WORKDIRS),
    BadInput("summary.json: of another version", ("stage=build",), ("summary.json",),
             text_file("work/summary.json", '{"schema_version": 99, "candidates": []}')),
    BadInput("own samples without their file", ("workloads=jsonl",), ("workloads.jsonl: this choice needs a value",)),
    *(BadInput(f"workloads.jsonl: {name}", ("workloads=jsonl", "workloads.jsonl=s.jsonl"), ("s.jsonl", *expected),
               text_file("s.jsonl", content)) for name, content, expected in SAMPLES),
    *(BadInput(f"calibration.jsonl: {name}", ("calibration.jsonl=c.jsonl",), ("calibration.jsonl=c.jsonl", *expected),
               text_file("c.jsonl", content)) for name, content, expected in TEXTS),
    BadInput("calibration.jsonl and calibration.workloads", ("calibration.jsonl=c.jsonl", "calibration.workloads=[copy]"),
             ("calibration.workloads: ", "leave one of the two out"), text_file("c.jsonl", '"a text"')),
    BadInput("calibration.jsonl in a file and calibration.workloads",
             ("--config-dir=own", "calibration=own", "calibration.workloads=[copy]"),
             ("calibration.workloads: ", "leave one of the two out"),
             text_file("own/calibration/own.yaml", "defaults: [generated, _self_]\njsonl: c.jsonl")),
    *(BadInput(f"monitor.snapshot: {name}", ("stage=monitor", "monitor.snapshot=s.json"),
               ("monitor.snapshot=s.json", *expected), text_file("s.json", content)) for name, content, expected in SNAPSHOTS),
    BadInput("a route's name that ends with -previous", ("stage=route", "routing.routes={chat-previous: a}"),
             ("routing.routes.chat-previous: must not end with -previous",)),
    BadInput("GGUF: version 1", ("stage=build", "model.path=m.gguf"), ("model.path=", "m.gguf", "version 1"),
             text_file("m.gguf", b"GGUF" + struct.pack("<IQQ", 1, 0, 0))),
    BadInput("GGUF: a Git LFS pointer", ("stage=build", "model.path=m.gguf"), ("m.gguf", "git lfs pull"),
             text_file("m.gguf", LFS)),
    *(BadInput(" ".join(arguments), arguments, expected) for arguments, expected in LOADS),
    *(BadInput(f"workloads.jsonl: {what}", ("workloads.jsonl=x",), ("workloads.jsonl=x",), with_path("x", make))
      for what, make in (("a pipe", os.mkfifo), ("a directory", Path.mkdir), ("100 GB", sparse_file(100 << 30)))),
    BadInput("stage=rollback without a champion", ("stage=rollback",), ("stage=rollback: nothing is registered",)),
    BadInput("stage=promote without candidates", ("stage=promote",), ("stage=promote: no candidates", "run stage=evaluate"),
             runs_stage=True),
    BadInput("a directory that may not be searched", ("stage=build", "model.path=model"), ("config.json", "Permission denied"),
             with_path("model", lambda path: checkpoint(path).chmod(0o444)), unprivileged=True),
    BadInput("weights that may not be read", ("stage=build", "model.path=model"),
             ("model.safetensors cannot be read (Permission denied)",),
             lambda path: (checkpoint(path / "model") / "model.safetensors").chmod(0), unprivileged=True),
    BadInput("a lock that may not be read", ("stage=prune", "prune.apply=true"),
             ("work/artifacts/.in_use", "may not write to it"), with_path("work/artifacts/.in_use", lambda path: path.touch(0)),
             runs_stage=True, unprivileged=True),
    BadInput("a draft checkpoint without weights", ("stage=evaluate", "workloads.speculation={draft:model}"),
             ("workloads.speculation.draft=", "model.safetensors", "download it again"), with_file("model.safetensors", "x"),
             loads_model=True),
    BadInput("a prompt longer than the context", ("workloads=jsonl", "workloads.jsonl=s.jsonl", "model.path=model"),
             ("sample s-0001", "its answer and workloads.extra_new_tokens=16", "32,768", "too many"), long_prompt,
             loads_model=True),
    BadInput("a reference with an end token", ("workloads=jsonl", "workloads.jsonl=s.jsonl"),
             ("the reference of sample s-0001 holds a token that ends answers", "leave the token out"),
             text_file("s.jsonl", '{"prompt": "a b", "reference": "c<|end|>"}'), loads_model=True),
    BadInput("more tokens than the model supports", ("backend=vllm", "model.path=model"),
             ("backend.max_model_len=", "the model was made for 2,048 tokens", "lower it"),
             with_config(max_position_embeddings=2048)),
    BadInput("an engine without evidence", ("stage=verify", "bundle=engine"),
             ("bundle=engine: its evidence (identity.json) is neither here", "mlflow artifacts download"),
             text_file("engine/bundle.json", "{}"), code=4, runs_stage=True),
    BadInput("a full disk", ("stage=capacity", "capacity.weights_gib=1", "workdir=work"), ("work",), text_file("x", ""), code=4,
             file_bytes=4000, runs_stage=True),
]  # fmt: skip
