"""Loads a checkpoint's model or tokenizer without executing the checkpoint's code. All stages load checkpoints through it.

transformers looks for code in the given directory (`custom_generate/`, `auto_map`, templates of other names). Therefore it
reads a temporary folder that contains only the configuration, the weights and the tokenizer's files.

The functions import transformers themselves, so that importing this module is cheap.
"""

import importlib.metadata
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stages.checkpoints.description import PATTERNS, inspect_checkpoint, layer_windows, read_config
from stages.checkpoints.families import FAMILIES
from stages.checkpoints.files import INDEX, TOKENIZER_FILES, read_json, refusal
from stages.checkpoints.rope import SLIDING, TOP_LEVEL_KEYS, compose_rope, read_rope
from stages.checkpoints.unread_keys import refuse_unread_keys
from stages.core.errors import UserError, short

PARTLY_ROTATED = ("glm4", "phi3")
"""Families whose attention can rotate a part of each head, `partial_rotary_factor`."""
DEFAULTED = (*TOP_LEVEL_KEYS, "original_max_position_embeddings")
"""Parameters for which the default of the model class is accepted. Without a `rope_type` in config.json, every default is."""


def load_causal_lm(directory: Path, **options: Any) -> Any:
    """Load the causal language model of a checkpoint. Raises UserError if it lacks a tensor of the model."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    quiet: Any = logging.disable_progress_bar  # untyped in transformers
    quiet()
    info = inspect_checkpoint(directory)
    load: Any = AutoModelForCausalLM.from_pretrained
    with _loadable_copy(directory, info.other_files, info.weight_files) as staged:
        config = compose_rope(directory, read_config(directory))
        (staged / "config.json").write_text(json.dumps(config), encoding="utf-8")
        if INDEX in info.other_files:  # transformers needs its metadata, and ignores the content
            index = {"weight_map": read_json(directory, INDEX)["weight_map"], "metadata": {}}
            (staged / INDEX).write_text(json.dumps(index), encoding="utf-8")
        options |= {"use_safetensors": True, "local_files_only": True, "trust_remote_code": False, "output_loading_info": True}
        model, loading = load(staged, **options)
    missing = sorted(loading["missing_keys"]) + sorted(str(key) for key in loading["mismatched_keys"])
    if missing:
        raise UserError(
            f"model.path={directory}: the weights do not fit {info.architecture}, {missing[0]} is missing or has another "
            "shape; give the complete checkpoint"
        )
    _check_rotary(directory, config, model)
    return model


Tensors = dict[str, tuple[int, ...]]


def expected_tensors(path: Path, config: dict[str, Any], frequencies: Mapping[str, Any] | None = None) -> Tensors:
    """Return the tensors that transformers would save for a model with this configuration.

    `config` is the content of config.json; `frequencies` are the rotary frequencies in the weight files. The model is built on
    the meta device. The first call imports torch and transformers, which takes 3 s.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with torch.device("meta"):
            config_for_model: Any = AutoConfig.for_model
            built: Any = AutoModelForCausalLM.from_config(config_for_model(**compose_rope(path, config)))
        # transformers 5 stacks the experts' weights in memory but saves them one by one.
        state: Any = revert_weight_conversion(built, dict(built.state_dict()))
        _check_rotary(path, config, built, frequencies)
        _check_windows(path, config, built.config)
        refuse_unread_keys(path, config, built.config, state)
    except UserError:
        raise
    except Exception as error:  # model classes raise various types for a bad configuration
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise refusal(
            path, f"config.json: transformers {importlib.metadata.version('transformers')} refuses it: {reason}; correct it"
        ) from None
    finally:
        logging.set_verbosity(verbosity)
    tied = built.config.tie_word_embeddings
    return {name: tuple(tensor.shape) for name, tensor in state.items() if not (tied and name == "lm_head.weight")}


def _check_rotary(path: Path, config: dict[str, Any], model: Any, stored: Mapping[str, Any] | None = None) -> None:
    """Raise UserError if a model's rotary embeddings differ from its configuration or from its weights.

    `stored`: frequencies by tensor name; old checkpoints contain them, and transformers ignores them.
    """
    rebuilt = type(model.model.rotary_emb)(model.config)  # rebuilt on the CPU: frequencies on the meta device have no values
    computed = [buffer for name, buffer in rebuilt.named_buffers() if name.endswith("inv_freq")]
    by_kind = {
        kind: (stated, model.config.rope_parameters if kind is None else model.config.rope_parameters[kind])
        for kind, stated in read_rope(path, config).layers.items()
        if kind is None or kind in model.config.layer_types
    }
    if stored:  # old versions of transformers stored the frequencies before they were scaled
        computed += [_rotary({**applied, "rope_type": "default"}, model.config)[0] for _, applied in by_kind.values()]
    for name, frequencies in (stored or {}).items():  # often rounded to 16 bits
        if not any(
            frequencies.shape == buffer.shape and buffer.allclose(frequencies.float(), rtol=0.01, atol=1e-6)
            for buffer in computed
        ):
            raise refusal(
                path,
                f"the rotary frequencies in {short(name)} of the weights differ from config.json; correct rope_theta and "
                "rope_scaling, or remove the tensor if they are correct",
            )
    for kind, (stated, applied) in by_kind.items():
        prefix = "" if kind is None else f"{kind}_"
        differing = [f"{key}={short(applied.get(key))}" for key, value in stated.items() if applied.get(key) != value]
        keys = DEFAULTED if "rope_type" in stated else applied.keys()
        expected, scale = _rotary({key: applied[key] for key in keys if key in applied} | stated, model.config)
        frequencies = getattr(rebuilt, f"{prefix}inv_freq")
        fits = 2 * len(frequencies) == head_dim_of(model.config) or model.config.model_type in PARTLY_ROTATED
        if (
            differing
            or not fits
            or frequencies.shape != expected.shape
            or not frequencies.allclose(expected, rtol=1e-6, atol=0)
        ):
            applies = "other rotary " + (f"parameters ({', '.join(differing)})" if differing else "frequencies")
        elif getattr(rebuilt, f"{prefix}attention_scaling") != scale:
            applies = f"another attention_factor (not {scale})"
        else:
            continue
        parameters = ", ".join(f"{key}={short(value)}" for key, value in stated.items())
        raise refusal(
            path,
            f"config.json: transformers applies {applies} to {'all' if kind is None else kind} layers of this "
            f"{model.config.model_type} than the stated {parameters}; correct the rope parameters",
        )


def head_dim_of(config: Any) -> int:
    return getattr(config, "head_dim", None) or int(config.hidden_size // config.num_attention_heads)


def _rotary(parameters: dict[str, Any], config: Any) -> tuple[Any, float]:
    """Return the inverse frequencies and the attention factor for RoPE parameters and the sizes of `config`."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if parameters["rope_type"] == "default":
        parameters = parameters | {"rope_type": "linear", "factor": 1.0}
    positions = config.max_position_embeddings
    plain = LlamaConfig(head_dim=head_dim_of(config), max_position_embeddings=positions, rope_parameters=parameters)
    frequencies, scale = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](plain)
    return frequencies, scale


def _check_windows(path: Path, config: dict[str, Any], loaded: Any) -> None:
    """Raise UserError if transformers' configuration `loaded` has other sliding layers than config.json describes."""
    applied = [kind == SLIDING for kind in getattr(loaded, "layer_types", None) or ()]
    completed = FAMILIES[loaded.model_type].with_defaults(config)
    stated = [window is not None for window in layer_windows(path, completed, len(applied))]
    if applied != stated:
        key = next((key for key in PATTERNS if key in config), "layer_types")
        raise refusal(
            path,
            f"config.json: {key}={short(config.get(key))} is not read in a model of type {loaded.model_type}, where "
            "other layers slide; remove it, and name the layers in layer_types",
        )


def load_tokenizer(directory: Path) -> Any:
    """Load the tokenizer of a checkpoint or of an engine bundle."""
    if (directory / "tokenizer.json").is_file():
        # AutoTokenizer may rebuild the tokenizer: Llama's class puts SentencePiece's pre-tokenizer before byte-level BPE.
        from transformers import PreTrainedTokenizerFast as AutoTokenizer
    else:
        from transformers import AutoTokenizer

    load: Any = AutoTokenizer.from_pretrained
    with _loadable_copy(
        directory, [name for name in ("config.json", *TOKENIZER_FILES) if (directory / name).is_file()]
    ) as staged:
        return load(staged, local_files_only=True, trust_remote_code=False)


@contextmanager
def _loadable_copy(directory: Path, copied: Sequence[str], linked: Sequence[str] = ()) -> Iterator[Path]:
    """Yield a temporary folder with copies of a directory's small files and links to its large ones."""
    with tempfile.TemporaryDirectory(prefix="kvgate-") as scratch:
        for name in copied:
            shutil.copyfile(directory / name, Path(scratch) / name)
        for name in linked:
            (Path(scratch) / name).symlink_to((directory / name).resolve())
        yield Path(scratch)
