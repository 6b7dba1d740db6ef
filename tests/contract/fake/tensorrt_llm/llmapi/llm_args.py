"""LLM arguments: only the known keys and choices."""

from typing import Any

from tensorrt_llm.facts import MODE, PYTORCH


def fields(inside: str) -> frozenset[str]:
    """Return a class's field names. In the mode `no switches`, only fields with a recorded default exist."""
    names = (key for key, fact in PYTORCH["llm_args"].items() if MODE != "no switches" or "default" in fact)
    return frozenset(key.removeprefix(inside) for key in names if key.startswith(inside))


def update_llm_args_with_extra_dict(llm_args: dict[str, Any], llm_args_dict: dict[str, Any]) -> dict[str, Any]:
    return llm_args | llm_args_dict


class KvCacheConfig:
    model_fields = fields("kv_cache_config.")


class QuantConfig:
    quant_algo: str | None = None
    kv_cache_quant_algo: str | None = None


class TorchLlmArgs:
    model_fields = fields("")

    def __init__(self, model: str, **arguments: Any) -> None:
        self.model, self.quant_config = model, QuantConfig()
        dtype = arguments.get("kv_cache_config", {}).get("dtype")
        self.quant_config.kv_cache_quant_algo = PYTORCH["checkpoint"]["cache_of_dtype"].get(dtype)
        self.values = {"model": model, **arguments}
        for key, value in flat(arguments).items():
            fact = PYTORCH["llm_args"].get(key)
            if fact is None or (MODE == "no block reuse" and key.endswith("enable_block_reuse")):
                raise ValueError(f"{key}: Extra inputs are not permitted")
            if value not in fact.get("choices", [value]):
                raise ValueError(f"{key}: Input should be one of {fact['choices']}")

    def model_dump(self, mode: str) -> dict[str, Any]:
        assert mode == "json"
        dumped = {**self.values, "kv_cache_config": dict(self.values["kv_cache_config"])}
        if MODE == "rewritten arguments":
            dumped["kv_cache_config"]["dtype"] = "auto"
        return dumped


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flattened: dict[str, Any] = {}
    for key, value in values.items():
        flattened |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flattened
