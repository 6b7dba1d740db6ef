"""Quantization: calibration texts, and ModelOpt's quantization of a checkpoint for one weights format and one KV policy.

The pipeline calls the functions of this module. Importing it is cheap: torch, transformers and ModelOpt are imported when
a function that needs them is called.
"""

from pathlib import Path

from pipeline.core.kv import KVPolicy
from pipeline.core.records import Progress
from pipeline.core.weights import WeightsFormat


def calibration_texts(checkpoint: Path, out: Path, *, samples: int, jsonl: Path | None, seed: int, progress: Progress) -> None:
    """Write the texts that static scales are measured on to `out/texts.json`, a JSON list of strings.

    Generated texts are prompts with their answers, as the checkpoint's chat template renders them, in equal parts from
    the calibration split of every workload. An evaluation never draws from that split.

    Args:
        checkpoint: Hugging Face checkpoint, for its tokenizer and chat template.
        out: An empty directory.
        samples: How many texts. A file with fewer lines gives fewer.
        jsonl: The user's texts, a JSON string or an object with "text" on each line; None to generate them.
        seed: Seed of the generated texts.
        progress: Called with a label, the texts done, and the texts in all.

    Raises:
        UserError: A line of `jsonl` holds no text, or the file has none.
    """
    from stages.quantize.calibration import calibration_texts

    calibration_texts(checkpoint, out, samples=samples, jsonl=jsonl, seed=seed, progress=progress)


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
    """Quantize a checkpoint's weights and measure the static scales of its KV cache.

    `out` receives:

    - `checkpoint/`: a plain Hugging Face checkpoint with the weights as the engine sees them (see materialize.py).
    - `unified_hf/`, `tensorrt_llm/`: ModelOpt's exports, where they can express the policy, each validated.
    - `kv_policy.json`, `kv_scales.json`: the sidecar that carries what no official export can.
    - `quantizers.json`: which quantizers were enabled, the calibration's size, and why an export was not written.

    Args:
        checkpoint: Hugging Face checkpoint with safetensors weights.
        out: An empty directory.
        weights: Format of the linear layers.
        policy: Formats of the stored keys and values.
        calibration_texts: Texts to run through the model.
        max_length: Longer texts are cut to this many tokens.
        seed: Seed of torch's random numbers.
        progress: Called with a label, the steps done, and the steps in all.

    Raises:
        UserError: The checkpoint or the texts cannot be used.
        RuntimeError: ModelOpt enabled other quantizers, or exported something else, than the recipe says: a defect.
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
