"""Evaluation: an engine is judged on the decode path, against a baseline that is measured once.

The pipeline calls the functions of this module. Importing it is cheap: numpy and transformers are imported when a
function that needs them is called.

The report is typed in `pipeline.verdict.report` and judged by `pipeline.verdict.gates.decide`.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.core.records import Engine, Progress, Sample
from pipeline.core.workloads import WorkloadsConfig

if TYPE_CHECKING:
    from pipeline.verdict.report import EvaluationReport
    from stages.evaluate.tokens import BundleTokenizer, Tokenizer


def load_samples(config: WorkloadsConfig) -> list[Sample]:
    """Return every sample of an evaluation: the generated ones, then those of the user's JSONL file.

    Loads no model and no tokenizer, so that a bad file is reported before anything expensive starts.

    Args:
        config: How many samples of each built-in workload, their seed, and the user's file if there is one.

    Raises:
        UserError: Each bad line of the user's file, one line `FILE:LINE: key: problem, fix` per problem.
    """
    from stages.evaluate.samples import load_samples

    return load_samples(config)


def open_tokenizer(directory: Path) -> "BundleTokenizer":
    """Open the tokenizer that an engine bundle or a checkpoint carries, from local files only.

    Raises:
        UserError: The tokenizer has no eos_token.
    """
    from stages.evaluate.tokens import BundleTokenizer

    return BundleTokenizer(directory)


def samples_digest(config: WorkloadsConfig, bundle: Path) -> str:
    """Return the `workloads_digest` that a report on these samples cites.

    Args:
        config: The workloads of the evaluation.
        bundle: Directory with the tokenizer that encodes the samples.

    Returns:
        sha256 over every sample and its token ids, in order, as 64 hexadecimal digits.
    """
    from stages.evaluate.tokens import samples_digest

    return samples_digest(config, bundle)


def measure_baseline(
    open_engine: Callable[[], Engine],
    samples: Sequence[Sample],
    tokenizer: "Tokenizer",
    out: Path,
    *,
    config: WorkloadsConfig,
    progress: Progress,
) -> None:
    """Run the baseline engine on `samples` and write what candidates are compared with.

    Args:
        open_engine: Loads the FP16-KV engine.
        samples: The samples, in the order of `load_samples`.
        tokenizer: The tokenizer of the engine bundle.
        out: An empty directory. It receives `logprobs.safetensors`, `answers.jsonl` and `baseline.json`.
        config: Batch size, limits and the load of the system metrics.
        progress: Called with a label, the tokens done, and the tokens in all.

    Raises:
        UserError: The baseline's logits are not finite, or a sample has too few tokens.
    """
    from stages.evaluate.measure import measure_baseline

    measure_baseline(open_engine, samples, tokenizer, out, config=config, progress=progress)


def evaluate_candidate(
    open_engine: Callable[[], Engine],
    samples: Sequence[Sample],
    tokenizer: "Tokenizer",
    baseline_dir: Path,
    out: Path,
    *,
    config: WorkloadsConfig,
    engine_digest: str,
    baseline_digest: str,
    progress: Progress,
    graph_digest: str | None = None,
) -> "EvaluationReport":
    """Run a candidate engine on `samples`, compare it with the baseline and write the report.

    Args:
        open_engine: Loads the candidate. It is called twice, because the canary corrupts the engine that it runs on.
        samples: The samples that the baseline was measured on.
        tokenizer: The tokenizer of the engine bundle.
        baseline_dir: What `measure_baseline` wrote.
        out: An empty directory. It receives `report.json`, `samples.jsonl` and `tokens.safetensors`.
        config: Batch size, limits, context bins, the canary and the load of the system metrics.
        engine_digest: Digest of the candidate's bundle, cited in the report.
        baseline_digest: Digest of the baseline's artifact, cited in the report.
        progress: Called with a label, the tokens done, and the tokens in all.
        graph_digest: Digest of the ONNX bundle that a TensorRT engine was built from, cited in the report.

    Returns:
        The report, as written to `report.json`.

    Raises:
        UserError: A sample has too few tokens.
        ValueError: The baseline was measured on other samples or has another vocabulary.
    """
    from stages.evaluate.measure import evaluate_candidate

    return evaluate_candidate(
        open_engine,
        samples,
        tokenizer,
        baseline_dir,
        out,
        config=config,
        engine_digest=engine_digest,
        baseline_digest=baseline_digest,
        progress=progress,
        graph_digest=graph_digest,
    )
