"""Loads a checkpoint's model or tokenizer without executing the checkpoint's code. All stages load checkpoints through it.

transformers looks for code in the given directory (`custom_generate/`, `auto_map`, templates of other names). Therefore it
reads a temporary folder that contains only the configuration, the weights and the tokenizer's files.

The functions import transformers themselves, so that importing this module is cheap.
"""

import importlib.metadata
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from stages.checkpoints.description import inspect_checkpoint, read_config
from stages.checkpoints.families import FAMILIES
from stages.checkpoints.files import INDEX, TOKENIZER_FILES, read_json, refusal
from stages.checkpoints.rope import SLIDING, compose_rope
from stages.checkpoints.rope_check import check_rotary
from stages.checkpoints.unread_keys import refuse_unread_keys
from stages.checkpoints.windows import PATTERNS, layer_windows
from stages.core.errors import UserError, short


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
    check_rotary(directory, config, model)
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
        check_rotary(path, config, built, frequencies)
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
        with _without_torch():
            from transformers import PreTrainedTokenizerFast as AutoTokenizer
    else:
        from transformers import AutoTokenizer

    load: Any = AutoTokenizer.from_pretrained
    with _loadable_copy(
        directory, [name for name in ("config.json", *TOKENIZER_FILES) if (directory / name).is_file()]
    ) as staged:
        return load(staged, local_files_only=True, trust_remote_code=False)


@contextmanager
def _without_torch() -> Iterator[None]:
    """Replace transformers' unused GGUF reader, so that importing its tokenizers does not import torch, which takes 2 s."""
    reader = "transformers.modeling_gguf_pytorch_utils"
    stand_in: Any = ModuleType(reader)
    stand_in.load_gguf_checkpoint = None
    replaced = sys.modules.setdefault(reader, stand_in) is stand_in
    try:
        yield
    finally:
        if replaced:
            del sys.modules[reader]


@contextmanager
def _loadable_copy(directory: Path, copied: Sequence[str], linked: Sequence[str] = ()) -> Iterator[Path]:
    """Yield a temporary folder with copies of a directory's small files and links to its large ones."""
    with tempfile.TemporaryDirectory(prefix="kvgate-") as scratch:
        for name in copied:
            shutil.copyfile(directory / name, Path(scratch) / name)
        for name in linked:
            (Path(scratch) / name).symlink_to((directory / name).resolve())
        yield Path(scratch)
