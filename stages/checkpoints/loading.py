"""Loads a checkpoint's model or tokenizer without executing the checkpoint's code. All stages load checkpoints through it.

transformers looks for code in the given directory (`custom_generate/`, `auto_map`, templates of other names). Therefore it
reads a temporary folder that contains only the configuration, the weights and the tokenizer's files.

The functions import transformers themselves, so that importing this module is cheap.
"""

import importlib.metadata
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

from stages.checkpoints.description import inspect_checkpoint, read_config
from stages.checkpoints.families import FAMILIES
from stages.checkpoints.files import INDEX, TOKENIZER_FILES, read_json, refusal
from stages.checkpoints.rope import BESIDE, SLIDING, compose_rope, read_rope
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
    with _staged(directory, info.other_files, info.weight_files) as staged:
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
"""Tensor name -> shape."""


def expected_tensors(path: Path, config: dict[str, Any]) -> Tensors:
    """Return the names and shapes of the tensors that transformers would save for a model with this configuration.

    `config` is the content of config.json. The model is built on the meta device. The first call imports torch and
    transformers, which takes 3 s.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with torch.device("meta"):
            described: Any = AutoConfig.for_model
            built: Any = AutoModelForCausalLM.from_config(described(**compose_rope(path, config)))
        # transformers 5 stacks the experts' weights in memory but saves them one by one.
        state: Any = revert_weight_conversion(built, dict(built.state_dict()))
        check_rotary(path, config, built)
        _check_windows(path, config, built.config)
        _refuse_unread(path, config, built.config, state)
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


PARTS = re.compile(
    "_(act|activation|alibi|architecture|attention|attn|bias|bidirectional|causal|cla|clip|diffusion|dim__model__base|experts?"
    "|gamma|gated|glu|interleaved?|layernorm|logits?|logn|lora|mla|moe|mrope|multiplier|mup|nope|norm|normalization|ntk"
    "|parallel__block|position__embeddings?__type|prefix|pruned|qk|qkv|query|residual|rmsnorm|rope|rotary|routed|router|scale"
    "|scaling|scoring|share|sharing|sinks?|skip|sliding|softcap|softcapping|softmax|swa|swiglu__limit|theta|topk__method"
    "|window|xpos|yarn)_"
)
"""Parts of the names of keys that change a decoder's computation."""
TRAINING = re.compile("_(coef|context|dropout|flash|fp32|fused|grad|init|initializer|jitter|loss|noise|output__router|pdrop)_")
"""Parts of the names of keys that affect only training, speed or precision."""
COMPARED = {*BESIDE, "rope_scaling", "sliding_window", "use_sliding_window", *PATTERNS}
"""Keys that other checks compare with what the model's class reads."""
SAME = ({"act", "activation"}, {"eps", "epsilon"})
"""Words of keys that mean the same: `hidden_act` of one family is `activation_function` in another."""
WITHOUT_EFFECT: tuple[Any, ...] = (
    *(None, False, 0, 1, {}, []),
    *("default", "none", "full", "softmax", "greedy", "rope", "rotary", "causal", "mha", "gqa", "mqa", "sdpa", "eager"),
)
"""Values that ask for nothing, or for what every family computes anyway."""
ALWAYS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("causal", "glu", "rope", "rotary", "scale attn", "scale attn weights", "no rope layers"), (None, True, 1)),
    "swiglu limit": (None, 7.0),
}
"""Key, without its words `is`, `use` and `embedding` -> the only values without effect, if they are not WITHOUT_EFFECT."""


def _refuse_unread(path: Path, config: dict[str, Any], read: Any, tensors: Iterable[str]) -> None:
    """Refuse keys of other families that ask for another computation: the model's class would silently ignore them.

    Args:
        path: Directory of the checkpoint, for errors.
        config: Content of config.json.
        read: transformers' configuration, an instance of the family's class.
        tensors: Names of the model's tensors.
    """
    declared = {*(field.name for field in fields(read)), *read.attribute_map, *read.attribute_map.values()}
    for key, value in config.items():
        words = key.lower().split("_")
        spaced = f"_{'__'.join(words)}_"  # every word between its own underscores, as in PARTS
        same = next((synonyms for synonyms in SAME if synonyms.intersection(words)), set())
        if key in declared or key in COMPARED or key == FAMILIES[read.model_type].local_base or not words[0]:
            continue
        if not (same or PARTS.search(spaced)) or TRAINING.search(spaced):
            continue
        if same and (value is None or isinstance(value, bool)):  # such as activation_checkpointing
            continue
        own = [name for name in declared if same.intersection(name.split("_"))]
        if own and not any(name in config for name in own):
            raise refusal(
                path, f"config.json: {short(key)} is not read in a model of type {read.model_type}; write it as {min(own)}"
            )
        if not _has_no_effect(words, value, [config[name] for name in own if name in config], tensors):
            other = get_close_matches(key, (declared | COMPARED) & config.keys(), 1, 0.6)
            if not isinstance(value, bool) and other and config[other[0]] == value:
                continue
            raise refusal(
                path,
                f"config.json: {short(key)}={short(value)} is not read in a model of type {read.model_type}; leave it out "
                "if the weights were trained without it",
            )


def _has_no_effect(words: list[str], value: Any, own: list[Any], tensors: Iterable[str]) -> bool:
    """Return whether the family computes what an unread key asks for.

    Args:
        words: Words of the key.
        value: Its value. A list of equal values, one by layer, counts as that value.
        own: Values of the family's own keys with the same meaning (`SAME`).
        tensors: Names of the model's tensors.
    """
    if isinstance(value, list) and value and all(each == value[0] for each in value):
        value = value[0]
    if own:  # other approximations of an activation have a longer name, and its gated form another
        value = {"swiglu": "silu", "geglu": "gelu"}.get(value, value) if isinstance(value, str) else value
        return value in (None, *own) or (isinstance(value, str) and any(str(one).startswith(value) for one in own))
    if isinstance(value, str) and {"norm", "normalization"}.intersection(words):
        norm = "layernorm" if "model.norm.bias" in tensors else "rmsnorm"
        return value.lower().replace("_", "") == norm
    applied = ALWAYS.get(" ".join(word for word in words if word not in ("is", "use", "embedding", "embeddings")))
    if "bias" in words:
        applied = (None, False, any(".bias" in name for name in tensors))
    elif "qk" in words and any("norm" in word for word in words):
        applied = (None, any(".q_norm." in name for name in tensors))
    applied = applied or WITHOUT_EFFECT
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in applied)


def _check_windows(path: Path, config: dict[str, Any], read: Any) -> None:
    """Refuse a config.json of which transformers reads other sliding layers, for example by another pattern."""
    applied = [kind == SLIDING for kind in getattr(read, "layer_types", None) or ()]
    completed = FAMILIES[read.model_type].completed(config)
    stated = [window is not None for window in layer_windows(path, completed, len(applied))]
    if applied != stated:
        key = next((key for key in PATTERNS if key in config), "layer_types")
        raise refusal(
            path,
            f"config.json: {key}={short(config.get(key))} is not read in a model of type {read.model_type}, where other layers "
            "slide; leave it out, and name the layers in layer_types",
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
    with _staged(directory, [name for name in ("config.json", *TOKENIZER_FILES) if (directory / name).is_file()]) as staged:
        return load(staged, local_files_only=True, trust_remote_code=False)


@contextmanager
def _without_torch() -> Iterator[None]:
    """Replace transformers' unused GGUF reader, so that importing its tokenizers does not import torch, which takes 2 s."""
    reader = "transformers.modeling_gguf_pytorch_utils"
    stand_in: Any = ModuleType(reader)
    stand_in.load_gguf_checkpoint = None
    mine = sys.modules.setdefault(reader, stand_in) is stand_in
    try:
        yield
    finally:
        if mine:
            del sys.modules[reader]


@contextmanager
def _staged(directory: Path, copied: Sequence[str], linked: Sequence[str] = ()) -> Iterator[Path]:
    """Yield a temporary folder with copies of a directory's small files and links to its large ones."""
    with tempfile.TemporaryDirectory(prefix="kvgate-") as scratch:
        for name in copied:
            shutil.copyfile(directory / name, Path(scratch) / name)
        for name in linked:
            (Path(scratch) / name).symlink_to((directory / name).resolve())
        yield Path(scratch)


DEFAULTED = (*BESIDE, "original_max_position_embeddings")
"""Parameters for which a model class may supply a default. It may supply others only if it also supplies `rope_type`."""


def check_rotary(path: Path, config: dict[str, Any], model: Any) -> None:
    """Raise UserError if a model's rotary embeddings differ from its configuration.

    Args:
        path: Directory of the checkpoint, for errors.
        config: Content of config.json.
        model: The model that transformers built from `config`, on any device.

    Raises:
        UserError: A parameter, a frequency or the attention factor differs.
    """
    made = type(model.model.rotary_emb)(model.config)  # rebuilt on the CPU: frequencies on the meta device have no values
    for kind, stated in read_rope(path, config).layers.items():
        if kind is not None and kind not in model.config.layer_types:
            continue
        prefix = "" if kind is None else f"{kind}_"
        applied = model.config.rope_parameters if kind is None else model.config.rope_parameters[kind]
        differing = [f"{key}={short(applied.get(key))}" for key, value in stated.items() if applied.get(key) != value]
        kept = DEFAULTED if "rope_type" in stated else applied.keys()
        wanted, scale = _rotary({key: applied[key] for key in kept if key in applied} | stated, model.config)
        frequencies = getattr(made, f"{prefix}inv_freq")
        if differing or frequencies.shape != wanted.shape or not frequencies.allclose(wanted, rtol=1e-6, atol=0):
            told = ", ".join(differing) or "other frequencies"
        elif getattr(made, f"{prefix}attention_scaling") != scale:
            told = f"another attention_factor than {scale}"
        else:
            continue
        parameters = ", ".join(f"{key}={short(value)}" for key, value in stated.items())
        raise refusal(
            path,
            f"config.json: transformers gives {'all' if kind is None else kind} layers of this {model.config.model_type} a "
            f"rotary embedding with {told}, and config.json states {parameters}; give a config.json that it reads as stated",
        )


def head_dim_of(config: Any) -> int:
    """Return the size of an attention head of a transformers configuration."""
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
