"""Fetch the champion from the registry, verify that it is the engine that was judged, load it and generate text.

    python examples/serve_champion.py "$(printf 'Copy:\\n04 Bergen 14 Tartu')"

The registry is MLFLOW_TRACKING_URI, or work/mlflow.db. Exits with the code of `stage=verify` when that refuses the engine.
It does so with 4 (something is missing) when the champion was judged on a workloads.jsonl that is not given: the registry
keeps its digest, and not the user's prompts.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import mlflow

from pipeline.core.records import Sample
from stages.engines.onnx.engine import load_engine
from stages.evaluate.tokens import BundleTokenizer


def fetch(model: str, directory: Path) -> Path:
    """Download the version that the alias `champion` points at into `directory`, an engine with its evidence.

    Raises SystemExit when the registry holds only the evidence, or when identity.json is not the one that it cites.
    """
    version = mlflow.MlflowClient().get_model_version_by_alias(model, "champion")
    mlflow.artifacts.download_artifacts(f"models:/{model}/{version.version}", dst_path=str(directory))
    if not (directory / "engine").is_dir():
        raise SystemExit(
            f"version {version.version} of {model} has no engine/: register it with tracking.log_bundle=true, or copy the "
            "bundle there"
        )
    digest = hashlib.sha256((directory / "identity.json").read_bytes()).hexdigest()
    if digest != version.tags["identity_digest"]:
        raise SystemExit(f"identity.json of version {version.version} is not the one that the registry cites")
    print(f"{model} version {version.version}: {version.tags['kv']}, {version.tags['verdict']}", file=sys.stderr)
    return directory


def verify(directory: Path, samples: Path | None) -> None:
    """Replay the evidence. Raises SystemExit with the exit code of stage=verify unless everything is the same.

    Args:
        directory: an engine with its evidence, as `fetch` leaves it.
        samples: the file of workloads.jsonl that the engine was judged on, if there was one.
    """
    if samples is not None:
        (directory / "workloads").mkdir()
        shutil.copy(samples, directory / "workloads")
    command = [sys.executable, "-m", "pipeline", "stage=verify", f"bundle={directory}"]
    result = subprocess.run(command, check=False, stdout=subprocess.DEVNULL)
    if result.returncode != 0:
        raise SystemExit(result.returncode)


def generate(engine_directory: Path, prompt: str, max_new_tokens: int) -> str:
    """Return the greedy answer to one user message, through the tokenizer that the bundle carries."""
    tokenizer = BundleTokenizer(engine_directory)
    engine = load_engine(engine_directory, threads=1)
    question = Sample(id="prompt", workload="custom", reference="", messages=(("user", prompt),))
    (answer,) = engine.generate([tokenizer.prompt_ids(question)], max_new_tokens, tokenizer.eos_token_id)
    return tokenizer.text(answer)


def main() -> None:
    parser = argparse.ArgumentParser(description="Generate text with the champion of a registry.")
    parser.add_argument("prompt")
    parser.add_argument("--model", default="kvgate-tiny", help="registered model (default: kvgate-tiny)")
    parser.add_argument("--samples", type=Path, help="the file of workloads.jsonl that the champion was judged on")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    options = parser.parse_args()
    mlflow.set_tracking_uri(os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{Path('work/mlflow.db').resolve()}")
    with tempfile.TemporaryDirectory() as scratch:
        directory = fetch(options.model, Path(scratch))
        verify(directory, options.samples)
        print(generate(directory / "engine", options.prompt, options.max_new_tokens))


if __name__ == "__main__":
    main()
