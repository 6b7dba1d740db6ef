"""Fetch the champion from the registry, verify that it is the judged engine, load it and generate text.

    python examples/serve_champion.py "$(printf 'Copy:\\n04 Bergen 14 Tartu')"

The registry is MLFLOW_TRACKING_URI; by default it is in work/. Exit codes, as in `stage=verify`: 0 on success, 2
for bad input, 3 if the engine is not the judged engine, and 4 if something is missing. For example, the file of workloads.jsonl
is missing if another machine judged the champion and `--samples` is not given. The registry keeps only the file's digest, not
the user's prompts.
"""

import argparse
import sys
from pathlib import Path

from pipeline.api import GateRefusal, MissingRequirement, UserError, champion

EXIT_CODES: dict[type[Exception], int] = {UserError: 2, GateRefusal: 3, MissingRequirement: 4}


def main() -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(description="Generate text with the champion of a registry.")
    parser.add_argument("prompt")
    parser.add_argument("--model", default="kvgate-tiny", help="registered model (default: kvgate-tiny)")
    parser.add_argument("--workdir", type=Path, default="work", help="work directory (default: work)")
    parser.add_argument("--samples", type=Path, help="the file of workloads.jsonl that the champion was judged on")
    parser.add_argument(
        "--trusted", type=Path, action="append", default=[], help="public key that must have signed the evidence"
    )
    parser.add_argument("--max-new-tokens", type=int, default=64)
    options = parser.parse_args()
    try:
        with champion(options.model, workdir=options.workdir, samples=options.samples, trusted=options.trusted) as engine:
            print(engine, file=sys.stderr)
            print(engine.generate(options.prompt, options.max_new_tokens))
    except tuple(EXIT_CODES) as error:
        print(f"serve_champion: {error}", file=sys.stderr)
        return EXIT_CODES[type(error)]
    return 0


if __name__ == "__main__":
    sys.exit(main())
