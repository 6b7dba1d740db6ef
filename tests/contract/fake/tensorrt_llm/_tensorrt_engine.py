"""The engine runtime."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from tensorrt_llm.facts import ENGINE, MODE, only
from tensorrt_llm.toy import Runtime, Toy


class LLM(Runtime):
    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        only(ENGINE["llm"], arguments, "LLM")
        only(ENGINE["kv_cache_config"], arguments["kv_cache_config"], "KvCacheConfig")
        if MODE == "hang while loading":
            time.sleep(600)
        folder = Path(arguments["model"])
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))["pretrained_config"]
        ranks = [np.load(folder / f"rank{rank}.engine") for rank in range(config["mapping"]["tp_size"])]
        embedding = np.concatenate([rank["embedding"] for rank in ranks])
        algorithm = config["quantization"]["kv_cache_quant_algo"]
        self.toy = Toy(embedding[: config["vocab_size"]], algorithm, float(ranks[0]["rcp"]), float(ranks[0]["scale"]))
