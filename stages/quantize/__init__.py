"""Quantize a checkpoint with ModelOpt for one weights format and one KV policy."""

from pathlib import Path

from pipeline.core.kv import KVPolicy
from pipeline.core.records import Progress
from pipeline.core.weights import WeightsFormat


def quantize(
    checkpoint: Path,
    out: Path,
    *,
    weights: WeightsFormat,
    policy: KVPolicy,
    calibration_texts: list[str],
    max_length: int,
    seed: int,
    progress: Progress,
) -> None:
    """Fill the empty directory `out`.

    - `checkpoint/`: a plain Hugging Face checkpoint with the weights as the engine sees them (see materialize.py).
    - `unified_hf/`, `tensorrt_llm/`: ModelOpt's exports, where they can express the policy, each validated.
    - `kv_policy.json`, `kv_scales.json`: the sidecar that carries what no official export can.
    - `quantizers.json`: which quantizers were enabled, the calibration's size, and why an export was not written.

    Texts longer than `max_length` tokens are cut. Raises UserError for a checkpoint or texts that cannot be used, and
    RuntimeError (a defect) when ModelOpt enabled other quantizers, or exported something else, than was asked.
    """
    from stages.quantize.run import run

    run(
        checkpoint,
        out,
        weights=weights,
        policy=policy,
        calibration_texts=calibration_texts,
        max_length=max_length,
        seed=seed,
        progress=progress,
    )
