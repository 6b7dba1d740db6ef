"""Base class of custom logit processors, which are pickled by name."""

import json
import pickle
from typing import Any


class CustomLogitProcessor:
    def __call__(self, logits: Any, custom_param_list: Any = None) -> Any:
        raise NotImplementedError

    @classmethod
    def to_str(cls) -> str:
        return json.dumps({"callable": pickle.dumps(cls).hex()})

    @classmethod
    def from_str(cls, json_str: str) -> Any:
        return pickle.loads(bytes.fromhex(json.loads(json_str)["callable"]))()
