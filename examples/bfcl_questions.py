"""Convert function calls of BFCL, the Berkeley Function Calling Leaderboard, to questions for `workloads=jsonl`.

    pip install --no-deps bfcl-eval==2026.3.23
    python examples/bfcl_questions.py questions.jsonl --categories simple_python multiple --samples 160
    python -m pipeline kv=fp8 workloads=jsonl workloads.jsonl=questions.jsonl

The script reads the package's data files and runs none of its code. The right answer is a single call in JSON, with the first
value that BFCL accepts per argument; BFCL's own checker accepts other values, too. Questions with several calls are skipped.
Questions with objects as arguments are skipped, too, because BFCL lists alternatives inside the objects.
"""

import argparse
import json
import random
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

TASK = (
    "Answer with one call of one of these functions, as JSON and nothing else: "
    '{"name": "FUNCTION", "arguments": {"ARGUMENT": VALUE}}. Give the required arguments, and others only if the user '
    "mentions them.\n\n"
)


def questions(data: Path, category: str) -> Iterator[dict[str, Any]]:
    """Yield the questions of a category whose answer is a single call."""
    name = f"BFCL_v4_{category}.json"
    answers = {line["id"]: line["ground_truth"] for line in read_lines(data / "possible_answer" / name)}
    for entry in read_lines(data / name):
        required = {function["name"]: function["parameters"]["required"] for function in entry["function"]}
        calls = [(function, values) for call in answers[entry["id"]] for function, values in call.items()]
        if len(calls) != 1:
            continue
        function, possible = calls[0]
        # The value "" means that the argument is optional.
        needed = {key: values for key, values in possible.items() if "" not in values or key in required[function]}
        chosen = {key: next((value for value in values if value != ""), None) for key, values in needed.items()}
        if None in chosen.values() or "{" in json.dumps(list(chosen.values())):
            continue
        system = TASK + json.dumps(entry["function"], indent=1)
        turns = [{"role": turn["role"], "content": turn["content"]} for turn in entry["question"][0]]
        yield {
            "id": entry["id"],
            "workload": f"bfcl_{category}",
            "messages": [{"role": "system", "content": system}, *turns],
            "reference": json.dumps({"name": function, "arguments": chosen}, ensure_ascii=False),
            "check": "tool_call",
            "tools": [{"name": key, "arguments": list(chosen) if key == function else required[key]} for key in required],
        }


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]


def main() -> None:
    parser = argparse.ArgumentParser(description="Write questions of BFCL for workloads=jsonl.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--categories", nargs="+", default=["simple_python", "multiple"], help="for example live_simple")
    parser.add_argument("--samples", type=int, default=160, help="maximum questions per category")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", type=Path, help="folder with BFCL_v4_*.json (default: the package bfcl-eval)")
    options = parser.parse_args()
    try:
        data = options.data or Path(str(metadata.distribution("bfcl-eval").locate_file("bfcl_eval/data")))
        by_category = [list(questions(data, category)) for category in options.categories]
    except (metadata.PackageNotFoundError, OSError) as error:
        sys.exit(f"bfcl_questions: {error}; pip install --no-deps bfcl-eval==2026.3.23, or give --data DIR")
    rng = random.Random(options.seed)
    drawn = [question for part in by_category for question in rng.sample(part, min(options.samples, len(part)))]
    options.out.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in drawn), encoding="utf-8")


if __name__ == "__main__":
    main()
