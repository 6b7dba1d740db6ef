"""Send an evaluation's questions to a running server, and compare its answers with the judged engine's answers.

    vllm serve ENGINE/checkpoint --config ENGINE/engine_args.yaml --port 8000 &
    python -m benchmarks.served_answers work/artifacts/evaluate/KEY work/artifacts/encode/KEY http://127.0.0.1:8000

The prompts are sent as token ids to /v1/completions, greedily. Exit code 1 if any answer differs.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

from benchmarks.recording import results_record, write_json
from stages.evaluate.inputs.tokens import read_encoded

EXTRA_TOKENS = 16
"""Maximum tokens of an answer beyond its reference: the default of workloads.extra_new_tokens."""


def post(url: str, **body: Any) -> Any:
    """Post a JSON request and return the JSON response."""
    request = Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urlopen(request, timeout=120) as response:
        return json.load(response)


def wait_for(url: str, seconds: float) -> str:
    """Wait until the server lists its model, and return the model's name."""
    end = time.monotonic() + seconds
    while True:
        try:
            with urlopen(f"{url}/v1/models", timeout=5) as response:
                return str(json.load(response)["data"][0]["id"])
        except (URLError, ConnectionError, TimeoutError):
            if time.monotonic() > end:
                raise
            time.sleep(0.5)


def compare(evaluation: Path, encoded: Path, url: str, questions: int) -> list[dict[str, Any]]:
    """Return the answers of the server and of the judged engine to at most `questions` judged samples."""
    items = {item.sample.id: item for item in read_encoded(encoded)}
    rows = [json.loads(line) for line in (evaluation / "samples.jsonl").read_text(encoding="utf-8").splitlines()]
    judged = [row for row in rows if row["judged"]]
    model, results = wait_for(url, seconds=120), []
    for row in judged[:: max(1, len(judged) // questions)][:questions]:
        item = items[row["id"]]
        answer = post(
            f"{url}/v1/completions",
            model=model,
            prompt=list(item.prompt),
            max_tokens=len(item.reference) + EXTRA_TOKENS,
            temperature=0.0,
        )
        served, expected = answer["choices"][0]["text"], row["candidate_generation"]
        results.append({"sample": row["id"], "same": served == expected, "served": served, "judged": expected})
    return results


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison with command-line arguments. Returns the exit code."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.served_answers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("evaluation", type=Path, help="artifact of the evaluation, with samples.jsonl")
    parser.add_argument("encoded", type=Path, help="artifact of the encoded samples")
    parser.add_argument("url", help="the server's address, without /v1")
    parser.add_argument("--questions", type=int, default=10)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    arguments = parser.parse_args(argv)
    results = compare(arguments.evaluation, arguments.encoded, arguments.url.rstrip("/"), arguments.questions)
    for row in results:
        print("same     " if row["same"] else "different", row["sample"], repr(row["served"]), repr(row["judged"]))
    same = sum(row["same"] for row in results)
    print(f"{same} of {len(results)} answers are the same")
    write_json(arguments.json, results_record(results))
    return 0 if results and same == len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
