"""Fetch the champion from the registry, verify that it is the engine that was judged, load it and generate text.

    python examples/serve_champion.py "$(printf 'Copy:\\n04 Bergen 14 Tartu')"

The registry is MLFLOW_TRACKING_URI, or that of work/. Exits with 0, or with what `stage=verify` exits with: 3 when the engine
is not the one that was judged, 4 when something is missing. That is so when the champion was judged on another machine on a
workloads.jsonl that is not given: the registry keeps its digest, and not the user's prompts.
"""

import argparse
import sys
from pathlib import Path

from pipeline.api import GateRefusal, MissingRequirement, UserError, champion

EXIT_CODES: dict[type[Exception], int] = {UserError: 2, GateRefusal: 3, MissingRequirement: 4}


def main() -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description="Generate text with the champion of a registry.")
    parser.add_argument("prompt")
    parser.add_argument("--model", default="kvgate-tiny", help="registered model (default: kvgate-tiny)")
    parser.add_argument("--workdir", type=Path, default="work", help="work directory (default: work)")
    parser.add_argument("--samples", type=Path, help="the file of workloads.jsonl that the champion was judged on")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    options = parser.parse_args()
    try:
        with champion(options.model, workdir=options.workdir, samples=options.samples) as engine:
            print(engine, file=sys.stderr)
            print(engine.generate(options.prompt, options.max_new_tokens))
    except tuple(EXIT_CODES) as error:
        print(f"serve_champion: {error}", file=sys.stderr)
        return EXIT_CODES[type(error)]
    return 0


if __name__ == "__main__":
    sys.exit(main())
