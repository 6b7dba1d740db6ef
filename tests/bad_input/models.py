"""Checkpoints whose files are not what they should be, or do not belong together."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bad_input.case import Case
from bad_input.makers import (
    CONFIG,
    Prepare,
    fifo,
    instead,
    shapes,
    sharded,
    sparse,
    with_config,
    with_file,
    with_json,
    with_weights,
)

MODEL = ("stage=build", "model.path=model")
NESTED = '{"a":' * 100_000 + "1" + "}" * 100_000
FP8 = {"quant_method": "modelopt", "quant_algo": "FP8"}
COMPRESSED = {"quant_method": "compressed-tensors", "config_groups": {"a": {"format": "marlin-24", "weights": {"num_bits": 4}}}}
Tensors = dict[str, tuple[int, ...]]


def case(name: str, prepare: Prepare, *says: str, **more: Any) -> Case:
    return Case(f"model: {name}", MODEL, ("model.path=", *(part.strip("'") for part in says)), prepare, **more)


CONFIGS: tuple[tuple[str, dict[str, Any], tuple[str, ...]], ...] = (
    ("layers as text", {"num_hidden_layers": "2"}, ("num_hidden_layers", "'2'")),
    ("10^9 layers", {"num_hidden_layers": 10**9}, ("num_hidden_layers", "1000000000")),
    ("layers of 5,000 digits", {"num_hidden_layers": 10**4200}, ("num_hidden_layers",)),
    ("-1 layers", {"num_hidden_layers": -1}, ("num_hidden_layers", "-1")),
    ("2.0 layers", {"num_hidden_layers": 2.0}, ("num_hidden_layers", "2.0")),
    ("true layers", {"num_hidden_layers": True}, ("num_hidden_layers", "True")),
    ("layers null", {"num_hidden_layers": None}, ("num_hidden_layers", "None")),
    ("layers missing", {"num_hidden_layers": ...}, ("num_hidden_layers",)),
    ("heads as a list", {"num_attention_heads": [2]}, ("num_attention_heads", "[2]")),
    ("no heads", {"num_attention_heads": 0}, ("num_attention_heads", "0")),
    ("KV heads that do not divide", {"num_attention_heads": 3, "num_key_value_heads": 2}, ("num_key_value_heads=2", "3")),
    ("odd head_dim", {"head_dim": 7}, ("head_dim=7",)),
    ("head_dim as text", {"head_dim": "64"}, ("head_dim", "'64'")),
    ("huge head_dim", {"head_dim": 10**12}, ("head_dim", "1000000000000")),
    ("hidden_size as text", {"hidden_size": "16"}, ("hidden_size", "'16'")),
    ("hidden_size null", {"hidden_size": None}, ("hidden_size", "None")),
    ("vocab_size 0", {"vocab_size": 0}, ("vocab_size", "0")),
    ("vocab_size as text", {"vocab_size": "many"}, ("vocab_size", "'many'")),
    ("positions as text", {"max_position_embeddings": "long"}, ("max_position_embeddings", "'long'")),
    ("positions missing", {"max_position_embeddings": ...}, ("max_position_embeddings",)),
    ("intermediate_size as an object", {"intermediate_size": {}}, ("intermediate_size", "{}")),
    ("intermediate_size as text", {"intermediate_size": "32"}, ("intermediate_size", "'32'")),
    ("10^9 experts", {"num_local_experts": 10**9}, ("num_local_experts", "1000000000")),
    ("unknown activation", {"hidden_act": "snake"}, ("hidden_act", "'snake'", "silu")),
    ("activation as a number", {"hidden_act": 3}, ("hidden_act", "3")),
    ("activation as code", {"hidden_act": "__import__('os').system('id')"}, ("hidden_act",)),
    ("eps as text", {"rms_norm_eps": "small"}, ("rms_norm_eps", "'small'")),
    ("eps NaN", {"rms_norm_eps": float("nan")}, ("rms_norm_eps", "nan")),
    ("eps negative", {"rms_norm_eps": -1e-5}, ("rms_norm_eps", "-1e-05")),
    ("theta infinite", {"rope_theta": float("inf")}, ("rope_theta", "inf")),
    ("theta that no float holds", {"rope_theta": 10**400}, ("rope_theta", "1000000")),
    ("theta as text", {"rope_theta": "10000"}, ("rope_theta", "'10000'")),
    ("tied as text", {"tie_word_embeddings": "false"}, ("tie_word_embeddings", "'false'")),
    ("bias as a number", {"attention_bias": 1}, ("attention_bias", "1")),
    ("mlp_bias as text", {"mlp_bias": "no"}, ("mlp_bias", "'no'")),
    ("unknown torch_dtype", {"torch_dtype": "float128"}, ("torch_dtype", "'float128'")),
    ("torch_dtype as code", {"torch_dtype": "hub.load"}, ("torch_dtype", "'hub.load'")),
    ("dtype as a list", {"dtype": ["float32"]}, ("dtype",)),
    ("eos as text", {"eos_token_id": "</s>"}, ("eos_token_id", "'</s>'")),
    ("padding that the vocabulary has not", {"pad_token_id": 10**9}, ("pad_token_id", "1000000000", "1,344")),
    ("rope_scaling as a number", {"rope_scaling": 2}, ("rope_scaling", "2")),
    ("rope_scaling of another kind", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, ("rope_scaling", "dynamic")),
    ("rope_scaling without factor", {"rope_scaling": {"rope_type": "linear"}}, ("rope_scaling.factor",)),
    ("factor as text", {"rope_scaling": {"rope_type": "linear", "factor": "2"}}, ("rope_scaling", "'2'")),
    ("factor NaN", {"rope_scaling": {"rope_type": "yarn", "factor": float("nan")}}, ("rope_scaling", "nan")),
    ("rope_type as a list", {"rope_scaling": {"rope_type": ["linear"], "factor": 2.0}}, ("rope_scaling",)),
    ("rope_parameters as a list", {"rope_parameters": []}, ("rope_parameters", "[]")),
    (
        "rope_parameters of another base",
        {"rope_parameters": {"rope_theta": 1.0}},
        ("rope_theta=10000.0", "rope_parameters", "1.0"),
    ),
    (
        "rope_parameters of another base by layer type",
        {"rope_parameters": {"full_attention": {"rope_theta": 5e5}, "sliding_attention": {}}},
        ("rope_theta=10000.0", "rope_parameters.full_attention", "500000.0"),
    ),
    (
        "rope_parameters of another kind than rope_scaling",
        {
            "rope_scaling": {"type": "linear", "factor": 2.0},
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "yarn", "factor": 2.0},
        },
        ("rope_scaling.rope_type", "yarn"),
    ),
    (
        "rope_parameters of another length than rope_scaling",
        {
            "rope_scaling": {"type": "linear", "factor": 2.0},
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "linear", "factor": 4.0},
        },
        ("factor=2.0", "factor=4.0"),
    ),
    ("rope_parameters without factor", {"rope_parameters": {"rope_type": "linear"}}, ("rope_parameters.factor",)),
    ("dtype and torch_dtype", {"dtype": "float16", "torch_dtype": "bfloat16"}, ("torch_dtype=bfloat16", "dtype=float16")),
    ("a vision tower", {"vision_config": {}}, ("vision_config", "pictures")),
    ("MLA", {"architectures": ["DeepseekV3ForCausalLM"], "kv_lora_rank": 512}, ("kv_lora_rank=512", "MLA")),
    (
        "a hybrid of two kinds of layers",
        {"architectures": ["JambaForCausalLM"], "attn_layer_period": 8},
        ("attn_layer_period=8", "state"),
    ),
    (
        "linear attention",
        {"architectures": ["Qwen3NextForCausalLM"], "linear_num_key_heads": 16},
        ("linear_num_key_heads=16", "state"),
    ),
    (
        "an encoder",
        {"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True},
        ("is_encoder_decoder=True", "encoder"),
    ),
    ("no architectures", {"architectures": ...}, ("architectures",)),
    ("two architectures", {"architectures": ["LlamaForCausalLM", "X"]}, ("architectures",)),
    ("architectures as text", {"architectures": "LlamaForCausalLM"}, ("architectures",)),
    ("architecture as an object", {"architectures": [{"a": 1}]}, ("not supported",)),
    ("unknown architecture", {"architectures": ["EvilForCausalLM"]}, ("EvilForCausalLM", "LlamaForCausalLM")),
    ("architecture of a megabyte", {"architectures": ["x" * 1_000_000]}, ("not supported",)),
    ("architecture with a terminal's codes", {"architectures": ["\x1b[2J\nLlama"]}, ("not supported",)),
    ("architecture of half a surrogate", {"architectures": ["\ud800"]}, ("surrogate",)),
    ("model_type of another", {"model_type": "gpt2"}, ("model_type", "llama")),
    ("model_type as a list", {"model_type": ["llama"]}, ("model_type",)),
    ("quantized for another backend", {"quantization_config": FP8}, ("modelopt", "backend=onnxruntime takes plain", "vllm")),
    (
        "quantized by an unknown method",
        {"quantization_config": {"quant_method": "mxfp4"}},
        ("quant_method='mxfp4'", "awq"),
    ),
    ("quantized by no method", {"quantization_config": [FP8]}, ("quantization_config=",)),
    ("quantized in an unknown format", {"quantization_config": COMPRESSED}, ("config_groups.a.format='marlin-24'", "pack-")),
    ("a vocabulary that the weights have not", {"vocab_size": 1345}, ("embed_tokens", "1345")),
    ("fewer layers than the weights", {"num_hidden_layers": 1}, ("model.layers.1",)),
    ("more layers than the weights", {"num_hidden_layers": 3}, ("model.layers.2", "missing")),
    ("biases that the weights have not", {"attention_bias": True}, ("bias", "missing")),
    ("an output matrix that the weights have not", {"tie_word_embeddings": False}, ("lm_head.weight",)),
    ("other heads than the weights'", {"num_attention_heads": 4}, ("self_attn", "shape")),
)

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0,
          "original_max_position_embeddings": 64}  # fmt: skip
NUMBERS: tuple[tuple[str, dict[str, Any], tuple[str, ...]], ...] = (
    ("an end that the vocabulary has not", {"eos_token_id": [1, 1344]}, ("eos_token_id", "1,344")),
    ("a theta below 1", {"rope_theta": 1e-300}, ("rope_theta", "1e-300")),
    ("an eps of everything", {"rms_norm_eps": 1e300}, ("rms_norm_eps", "1e+300")),
    ("more than the whole head rotated", {"partial_rotary_factor": 2}, ("partial_rotary_factor", "2")),
    ("a factor of true", {"rope_scaling": {"rope_type": "linear", "factor": True}}, ("rope_scaling.factor", "True")),
    (
        "a scaling from 0",
        {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 0}},
        ("original_max_position_embeddings",),
    ),
    ("frequencies without a range", {"rope_scaling": LLAMA3}, ("rope_scaling.low_freq_factor", "1.0")),
)


def drop(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


def put(name: str, shape: tuple[int, ...]) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: shape})


NORM, UP, EMBED = "model.norm.weight", "model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"
FILE = "model.safetensors"
ZEROS = b"\0" * 8


def entry(**values: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda header: header | {NORM: header[NORM] | values}


WEIGHTS: tuple[tuple[str, Prepare, tuple[str, ...]], ...] = (
    ("truncated weights", with_file(FILE, lambda old: old[:-100]), (FILE, "download")),
    ("truncated header", with_file(FILE, lambda old: old[:50]), (FILE, "download")),
    ("four bytes of weights", with_file(FILE, b"\1\2\3\4"), (FILE, "download")),
    ("empty weights", with_file(FILE, b""), (FILE, "download")),
    ("garbage for weights", with_file(FILE, b"garbage!" * 1000), (FILE, "download")),
    ("a zip for weights", with_file(FILE, b"PK\3\4" + b"\0" * 1000), (FILE, "download")),
    ("a pickle for weights", with_file(FILE, b"\x80\x04\x95" + b"\0" * 1000), (FILE, "download")),
    ("a header of a terabyte", with_file(FILE, lambda old: struct.pack("<Q", 10**12) + old[8:]), (FILE, "download")),
    ("a header of 2^64-1 bytes", with_file(FILE, lambda old: b"\xff" * 8 + old[8:]), (FILE, "download")),
    ("a header that is no JSON", with_file(FILE, lambda old: old[:8] + b"x" + old[9:]), (FILE, "download")),
    ("a header that is a list", with_file(FILE, struct.pack("<Q", 2) + b"[]"), (FILE, "download")),
    ("a header nested deep", with_file(FILE, struct.pack("<Q", len(NESTED)) + NESTED.encode()), (FILE, "download")),
    ("a header without tensors", with_file(FILE, struct.pack("<Q", 2) + b"{}"), ("missing",)),
    ("bytes after the weights", with_file(FILE, lambda old: old + ZEROS), (FILE, "download")),
    ("a tensor missing", with_weights(drop(NORM)), (NORM, "missing")),
    ("a tensor too many", with_weights(put("model.layers.0.self_attn.q_proj.bias", (128,))), ("q_proj.bias", "no place")),
    ("a tensor of code's name", with_weights(put("__import__", (1,))), ("__import__", "no place")),
    ("a tensor's name with a terminal's codes", with_weights(put("\x1b[2J\n", (1,))), ("no place",)),
    ("a tensor transposed", with_weights(put(UP, (16, 32))), (UP, "[16, 32]", "[32, 16]")),
    ("a tensor of three dimensions", with_weights(put(UP, (32, 16, 1))), (UP, "[32, 16, 1]")),
    ("a scalar", with_weights(put(NORM, ())), (NORM, "[]")),
    ("an empty tensor", with_weights(put(NORM, (0,))), (NORM, "[0]")),
    ("whole numbers", with_weights(dtypes={NORM: "I8"}), (NORM, "I8")),
    ("64-bit whole numbers", with_weights(dtypes={UP: "I64"}), (UP, "I64")),
    ("FP8 weights", with_weights(dtypes={UP: "F8_E4M3"}), (UP, "F8_E4M3")),
    ("an unknown type", with_weights(header=entry(dtype="F7")), (FILE,)),
    ("a type that is a number", with_weights(header=entry(dtype=32)), (FILE,)),
    ("offsets beyond the end", with_weights(header=entry(data_offsets=[0, 10**12])), (FILE,)),
    ("offsets that overlap", with_weights(header=entry(data_offsets=[0, 64])), (FILE,)),
    ("offsets backwards", with_weights(header=entry(data_offsets=[64, 0])), (FILE,)),
    ("negative offsets", with_weights(header=entry(data_offsets=[-64, 0])), (FILE,)),
    ("a shape that overflows", with_weights(header=entry(shape=[2**40, 2**40])), (FILE,)),
    ("a negative shape", with_weights(header=entry(shape=[-16])), (FILE,)),
    ("a shape as text", with_weights(header=entry(shape="16")), (FILE,)),
    ("NaN in the last weight", with_weights(data=lambda zeros: zeros[:-4] + b"\0\0\xc0\x7f"), (FILE, NORM, "NaN")),
    ("infinity in the first weight", with_weights(dtypes={EMBED: "F64"}, data=lambda old: old[:6] + b"\xf0\xff" + old[8:]),
     (FILE, EMBED, "infinity")),
    ("weights as a directory", instead(FILE, lambda path: path.mkdir()), (FILE,)),
    ("weights as a pipe", instead(FILE, fifo), (FILE,)),
    ("weights as a link to nowhere", instead(FILE, lambda path: path.symlink_to("/nowhere")), (FILE,)),
    ("weights as a link to themselves", instead(FILE, lambda path: path.symlink_to(path.name)), (FILE,)),
    ("weights as a link to a device", instead(FILE, lambda path: path.symlink_to("/dev/zero")), (FILE,)),
    ("weights as a link out of the directory", instead(FILE, lambda path: path.symlink_to("/etc/passwd")), (FILE, "leaves")),
    ("weights of a terabyte of nothing", instead(FILE, sparse(1 << 40)), (FILE,)),
    ("no weights", instead(FILE, lambda _: None), (FILE, "missing")),
    ("pickles alone", instead(FILE, lambda path: path.with_name("pytorch_model.bin").write_bytes(b"x")),
     ("pickled weights",)),
)  # fmt: skip


def link_out(path: Path) -> None:
    (path.parent.parent / "other").write_text(json.dumps(CONFIG))
    path.symlink_to("../other")


def unreadable(path: Path) -> None:
    path.write_text("{}")
    path.chmod(0)


JSON: tuple[tuple[str, Prepare, tuple[str, ...]], ...] = tuple(
    (f"{name} {what}", prepare, (name, *says))
    for name in ("config.json",)
    for what, prepare, says in (
        ("missing", instead(name, lambda _: None), ("missing",)),
        ("empty", with_file(name, ""), ("not JSON",)),
        ("cut off", with_file(name, lambda old: old[:40]), ("not JSON",)),
        ("not UTF-8", with_file(name, b"\xff\xfe{}"), ("not UTF-8",)),
        ("of UTF-16", with_file(name, "{}".encode("utf-16")), ("not UTF-8",)),
        ("with a byte order mark", with_file(name, b"\xef\xbb\xbf{}"), ("not JSON",)),
        ("a list", with_file(name, "[]"), ("object",)),
        ("null", with_file(name, "null"), ("object",)),
        ("with a key twice", with_file(name, lambda old: old.rstrip()[:-1] + b', "zz": 1, "zz": 2}'), ("twice",)),
        ("a number of 5,000 digits", with_file(name, "9" * 5000), ("not JSON",)),
        ("nested deep", with_file(name, NESTED), ("nested too deep",)),
        ("of zeros", with_file(name, bytes(1000)), ("not JSON",)),
        ("a directory", instead(name, lambda path: path.mkdir()), ("directory",)),
        ("a pipe", instead(name, fifo), ("pipe",)),
        ("a device", instead(name, lambda path: path.symlink_to("/dev/zero")), ("device",)),
        ("a link to nowhere", instead(name, lambda path: path.symlink_to("/nowhere")), ("no such file",)),
        ("a link to itself", instead(name, lambda path: path.symlink_to(path.name)), ("cannot be read",)),
        ("a link out of the directory", instead(name, link_out), ("leaves the directory",)),
        ("of 10 GB", instead(name, sparse(10 << 30)), ("10,737,418,240 bytes",)),
        ("unreadable", instead(name, unreadable), ("Permission denied",)),
    )
)  # fmt: skip


INDEX = "model.safetensors.index.json"
NAMES = list(shapes())
SHARDS: tuple[tuple[str, Prepare, tuple[str, ...]], ...] = (
    ("an index that is a list", sharded([]), (INDEX, "object")),
    ("an index without weight_map", sharded({}), (INDEX, "weight_map")),
    ("a weight_map that is a list", sharded({"weight_map": []}), (INDEX, "weight_map")),
    ("an index of numbers", sharded({"weight_map": {NORM: 3}}), (INDEX, "3")),
    ("an index that leaves the directory", sharded({"weight_map": {NORM: "../x.safetensors"}}), (INDEX, "../x")),
    ("an index of pickles", sharded({"weight_map": {NORM: "x.bin"}}), (INDEX, "x.bin")),
    ("a shard missing", sharded({"weight_map": {NORM: "c.safetensors"}}), (INDEX, "c.safetensors", "missing")),
    ("an index that swaps shards", sharded(lambda whole: {"weight_map": dict.fromkeys(whole, "a.safetensors")
     | {NAMES[0]: "b.safetensors"}}), (INDEX, EMBED)),
    ("a tensor in two shards", sharded(lambda whole: {"weight_map": whole},
     {"a.safetensors": NAMES, "b.safetensors": NAMES[-1:]}), (NORM, "both")),
    ("a tensor in no shard", sharded(lambda whole: {"weight_map": whole},
     {"a.safetensors": NAMES[:5], "b.safetensors": NAMES[5:-1]}), (NORM, "missing")),
    ("an index as a pipe", instead(FILE, lambda path: fifo(path.with_name(INDEX))), (INDEX, "pipe")),
)  # fmt: skip

TOKENIZER = "tokenizer.json"
EVIL = {"tokenizer_class": "EvilTokenizer", "auto_map": {"AutoTokenizer": ["evil.EvilTokenizer", None]}}
TOKENIZERS: tuple[tuple[str, Prepare, tuple[str, ...]], ...] = (
    ("no tokenizer", instead(TOKENIZER, lambda _: None), ("no tokenizer",)),
    ("SentencePiece alone", instead(TOKENIZER, lambda path: path.with_name("tokenizer.model").write_bytes(b"x")),
     ("tokenizer.model",)),
    ("a tokenizer as a pipe", instead(TOKENIZER, fifo), (TOKENIZER,)),
    ("a tokenizer as a directory", instead(TOKENIZER, lambda path: path.mkdir()), (TOKENIZER,)),
    ("a tokenizer as a link to a device", instead(TOKENIZER, lambda path: path.symlink_to("/dev/zero")), (TOKENIZER,)),
    ("a tokenizer of 10 GB", instead(TOKENIZER, sparse(10 << 30)), (TOKENIZER, "bytes")),
    ("an empty tokenizer", with_file(TOKENIZER, ""), (TOKENIZER,)),
    ("a tokenizer that is no JSON", with_file(TOKENIZER, "{"), (TOKENIZER,)),
    ("a tokenizer that is a list", with_file(TOKENIZER, "[]"), (TOKENIZER,)),
    ("a tokenizer nested deep", with_file(TOKENIZER, NESTED), (TOKENIZER,)),
    ("a token beyond the model", with_json(TOKENIZER, lambda old: old | {"model": old["model"] | {"vocab": {
        **old["model"]["vocab"], "zzz": 10**6}}}), (TOKENIZER, "1000000", "1344")),
    ("merges that are dropped by chance", with_json(TOKENIZER, lambda old: old | {"model": old["model"] | {"dropout": 0.5}}),
     (TOKENIZER, "dropout", "0.5")),
    ("a template of a token that is not there", with_json(TOKENIZER, lambda old: old | {"post_processor": {
        "type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<nope>", "type_id": 0}}], "pair": [],
        "special_tokens": {}}}), (TOKENIZER, "post_processor", "<nope>")),
    ("added_tokens that is an object", with_json(TOKENIZER, lambda old: old | {"added_tokens": {}}),
     (TOKENIZER, "added_tokens")),
    ("tokenizer_config that is a list", with_file("tokenizer_config.json", "[]"), ("tokenizer_config.json", "object")),
    ("tokenizer_config that is no JSON", with_file("tokenizer_config.json", "{"), ("tokenizer_config.json", "JSON")),
    ("tokenizer_config nested deep", with_file("tokenizer_config.json", NESTED), ("tokenizer_config.json", "deep")),
    ("tokenizer_config as a pipe", instead("tokenizer_config.json", fifo), ("tokenizer_config.json",)),
    ("a tokenizer of code", with_json("tokenizer_config.json", lambda old: old | EVIL),
     ("tokenizer_config.json", "auto_map")),
    ("special_tokens_map that is a list", with_file("special_tokens_map.json", "[]"), ("special_tokens_map.json",)),
    ("generation_config that is no JSON", with_file("generation_config.json", "x"), ("generation_config.json", "JSON")),
    ("generation_config that is a list", with_file("generation_config.json", "[]"), ("generation_config.json", "object")),
    ("generation_config as a directory", instead("generation_config.json", lambda path: path.mkdir()),
     ("generation_config.json",)),
)  # fmt: skip

HELD_AGAINST_THE_MODEL = (
    "a vocabulary that the weights have not", "fewer layers than the weights", "more layers than the weights",
    "biases that the weights have not", "an output matrix that the weights have not", "other heads than the weights'",
    "a header without tensors", "a tensor missing", "a tensor too many", "a tensor of code's name",
    "a tensor's name with a terminal's codes", "a tensor transposed", "a tensor of three dimensions", "a scalar",
    "an empty tensor", "a tensor in no shard",
)  # fmt: skip
"""What shows once transformers has built the model on the meta device."""


def tokenizer_with(**parts: Any) -> Prepare:
    return with_json(TOKENIZER, lambda old: old | parts)


def tokenizer_config_with(**parts: Any) -> Prepare:
    return with_json("tokenizer_config.json", lambda old: old | parts)


CANNOT = "its tokenizer cannot be loaded"
SPLIT = {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}
OPENED: tuple[tuple[str, Prepare, tuple[str, ...]], ...] = (
    ("a tokenizer without a model", with_json(TOKENIZER, lambda old: {k: v for k, v in old.items() if k != "model"}),
     (CANNOT, "model")),
    ("a vocabulary that is a list", with_json(TOKENIZER, lambda old: old | {"model": old["model"] | {"vocab": []}}),
     (CANNOT,)),
    ("a vocabulary of texts", with_json(TOKENIZER, lambda old: old | {"model": old["model"] | {"vocab": {"a": "b"}}}),
     (CANNOT,)),
    ("a negative token", with_json(TOKENIZER, lambda old: old | {"model": old["model"] | {"vocab": {
        **old["model"]["vocab"], "zzz": -5}}}), (CANNOT,)),
    ("eos_token as a number", tokenizer_config_with(eos_token=3), (CANNOT,)),
    ("chat_template as a number", tokenizer_config_with(chat_template=3), ("chat_template",)),
    ("chat_template that is no template", tokenizer_config_with(chat_template="{% for"), ("chat_template",)),
    ("an unknown normalizer", tokenizer_with(normalizer={"type": "Evil"}), (CANNOT, "Normalizer")),
    ("an expression that is none", tokenizer_with(pre_tokenizer=SPLIT), (CANNOT, "parenthesis")),
    ("a merge of no tokens", with_json(TOKENIZER, lambda old: old | {"model": old["model"] | {"merges": ["zz qq"]}}),
     (CANNOT, "zz")),
    ("a tokenizer of another version", tokenizer_with(version="99.0"), (CANNOT, "99.0")),
    ("tokenizer_class as a list", tokenizer_config_with(tokenizer_class=["a"]), (CANNOT,)),
    ("a number of a token that is none", tokenizer_config_with(added_tokens_decoder={"x": {"content": "y"}}), (CANNOT, "'x'")),
    ("extra_special_tokens as numbers", tokenizer_config_with(extra_special_tokens=[1]), (CANNOT,)),
    ("chat_template.jinja not UTF-8", with_file("chat_template.jinja", b"\xff\xfe{"), (CANNOT, "utf-8")),
    ("a template that refuses everything", tokenizer_config_with(chat_template="{{ raise_exception('no') }}"),
     ("chat_template refuses a greeting", "no")),
    ("a template that leaves the question out", tokenizer_config_with(chat_template="hello"), ("chat_template leaves out",)),
    ("an end that is no token", tokenizer_config_with(eos_token="<nope>"), ("makes token 1344", "1344")),
    ("no end", tokenizer_config_with(eos_token=None), ("no eos_token",)),
    ("a tokenizer that deletes everything",
     tokenizer_with(normalizer={"type": "Replace", "pattern": {"Regex": "."}, "content": ""}), ("makes the same",)),
    ("a template that divides by 0", tokenizer_config_with(chat_template="{{ 1 / 0 }}"), ("chat_template", "ZeroDivision")),
)  # fmt: skip
"""What shows once transformers has opened the tokenizer."""

CASES = [
    *(
        case(name, prepare, *says, loads_model=name in HELD_AGAINST_THE_MODEL)
        for name, prepare, says in (
            *((name, with_config(**changes), says) for name, changes, says in (*CONFIGS, *NUMBERS)),
            *(*WEIGHTS, *SHARDS, *TOKENIZERS),
        )
    ),
    *(case(name, prepare, *says, loads_model=True) for name, prepare, says in OPENED),
    *(case(name, prepare, *says, unprivileged=name.endswith("unreadable")) for name, prepare, says in JSON),
]
