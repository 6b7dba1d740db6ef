"""OmegaConf parses a text once in a process: tests compose the same files of conf/ a thousand times."""

from copy import deepcopy
from typing import Any

import yaml


def parse_yaml_once() -> None:
    """Keep what OmegaConf's loader made of a text; the next one who loads it gets a copy."""
    parse, parsed = yaml.load, dict[str, Any]()

    def load(stream: Any, Loader: Any) -> Any:
        if Loader.__name__ != "OmegaConfLoader":
            return parse(stream, Loader)
        text: str = stream if isinstance(stream, str) else stream.read()
        if text not in parsed:
            parsed[text] = parse(text, Loader)
        return deepcopy(parsed[text])

    yaml.load = load
