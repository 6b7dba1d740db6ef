"""Server arguments with the recorded names."""

import json
from pathlib import Path
from typing import Any

import sglang

FACTS = json.loads((Path(__file__).resolve().parents[3] / "facts" / "sglang-0.5.23.json").read_text(encoding="utf-8"))
MISSING = {"mem_fraction_static"} if sglang.MODE == "misses a field" else set()


class ServerArgs:
    def __init__(self, **arguments: Any) -> None:
        unknown = arguments.keys() - (set(FACTS["server_args"]) - MISSING)
        if unknown:
            raise TypeError(f"Unexpected keyword argument '{min(unknown)}'")
        self.arguments = arguments

    def resolve_once(self) -> None:
        if sglang.MODE == "other chunks":
            self.arguments["chunked_prefill_size"] = 64

    def resolved_dict(self) -> dict[str, Any]:
        return self.arguments
