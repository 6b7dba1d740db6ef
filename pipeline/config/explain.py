"""Error messages for configurations, one line per problem, since the texts of pydantic are for developers."""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from itertools import accumulate
from typing import Any, get_args

from omegaconf import DictConfig, OmegaConf
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from pipeline.config import CONF
from pipeline.config.config import CLASS_NAME, EXPERIMENT_NAME, MODEL_NAME, Config
from stages.core.errors import short
from stages.core.redaction import leaves
from stages.engines.config import backend_configs
from stages.policies.policy import POLICY_NAME

MAX_PLACES = 3
"""Maximum number of complete keys that a hint lists for a key that was given without its section."""
NAMES = {
    POLICY_NAME: "must begin with a small letter, and have only small letters, digits and _",
    MODEL_NAME: "must have no / : ' and no characters that cannot be printed",
    EXPERIMENT_NAME: "must have no characters that cannot be printed",
    CLASS_NAME: "must be 1 to 64 letters, digits, _ and -",
}
"""Pattern of a name -> the pattern in words."""
KINDS = (
    dict.fromkeys(("list_type", "tuple_type"), "a list, as in [VALUE,VALUE]")
    | dict.fromkeys(("dict_type", "model_type"), "a mapping of keys to values")
    | dict.fromkeys(("bool_type", "bool_parsing"), "true or false")
    | {"union_tag_not_found": "a mapping with a name"}
)
"""Type of pydantic's problem -> the expected value in words."""
NO_KEYS = {"experiment": "name it first in `defaults`, as in `defaults: [OPTION, _self_]`"} | dict.fromkeys(
    ("rollback", "version", "previous", "champion"),
    "stage=rollback restores the previous version, stage=promote promote.name=NAME another one",
)
"""Name that users take for a key -> what works instead."""
INCLUDE = "or begin the file with `defaults: [OPTION]` and keep only the keys that differ from this option"
"""Fix for a file of --config-dir that lacks keys of its group."""
KEY_MARK = "[key]"
"""Last part of pydantic's location of a problem with a mapping's key instead of its value."""


def explain_validation(error: ValidationError, composed: DictConfig) -> list[str]:
    """Return one line per problem: `gates.max_mean_kl: input should be greater than 0 (got -1.0)`."""
    raw = dict(leaves(OmegaConf.to_container(composed)))
    problems = error.errors(include_url=False)
    wrong_keys = [".".join(map(str, problem["loc"])) for problem in problems]
    missing, unknown = (
        _by_section(_location(problem, composed) for problem in problems if problem["type"] == kind)
        for kind in ("missing", "extra_forbidden")
    )
    lines = []
    for section, names in missing.items():
        others = f"{', '.join(unknown[section])} and " if section in unknown else ""
        fix = f"{'rename or ' if others else ''}{f'add them, {INCLUDE}' if names[1:] else 'add it'}"
        lines.append(f"{section}: has {others}no {', '.join(names)}; {fix}")
    for problem in problems:
        if problem["type"] == "too_short" and problem["ctx"]["actual_length"] == 0 and problem["input"]:
            continue  # the problems of the list's items have their own lines
        location = _location(problem, composed)
        if problem["type"] in ("missing", "extra_forbidden") and ".".join(map(str, location[:-1])) in missing:
            continue
        *_, key = places = list(accumulate(map(str, location), "{}.{}".format)) or [""]
        texts = [text for text in map(raw.get, places) if isinstance(text, str)]
        # The value of the key, or of a section around it, may be an interpolation such as `${seed}` or `${oc.env:HOME}`.
        interpolated = next((text for text in texts if "${" in text), None)
        source = re.fullmatch(r"\$\{([\w.]+)\}", interpolated or "")
        if source and any(f"{wrong}.".startswith(f"{source[1]}.") for wrong in wrong_keys):
            continue  # interpolated from another key, whose problem has its own line
        # An environment variable may hold a secret, so only its name is shown.
        text: str = problem["msg"]
        value: Any = problem["input"] if interpolated is None else interpolated
        if problem["type"] == "extra_forbidden":
            lines.append(f"{key}: {_unknown(location, composed)}")
        elif problem["type"] == "value_error":  # messages of kvgate's validators begin with the key
            lines.append(f"{key}.{text.removeprefix('Value error, ')}" if key else text.removeprefix("Value error, "))
        elif problem["type"] == "literal_error":
            choices = ["".join(groups) for groups in re.findall(r"'([^']*)'|(?<= )(\d+)", text)]
            wrong = f"{key}: unknown key" if problem["loc"][-1] == KEY_MARK else f"{key}={value}: no such option"
            lines.append(f"{wrong}{suggest(str(value), choices)}")
        else:
            got = short(value if isinstance(value, int) else repr(value), 200)
            lines.append(f"{key}: {_plain(problem)} (got {got}){_fix(problem, location, value)}")
    return lines


def _location(problem: ErrorDetails, composed: DictConfig) -> tuple[int | str, ...]:
    """Return the key of a problem, without the marks and tags that pydantic inserts."""
    location = tuple(part for part in problem["loc"] if part != KEY_MARK)
    return location[:1] + location[2:] if location[1:2] == (OmegaConf.select(composed, "backend.name"),) else location


def _by_section(places: Iterable[tuple[int | str, ...]]) -> dict[str, list[str]]:
    """Return section -> names of keys in it."""
    sections = defaultdict[str, list[str]](list)
    for *section, name in places:
        sections[".".join(map(str, section))].append(str(name))
    return dict(sections)


def _fix(problem: ErrorDetails, location: tuple[int | str, ...], value: Any) -> str:
    """Return the fix for a missing `name`, a number or a variable instead of a value, and a value instead of keys; else ""."""
    if problem["type"] == "union_tag_not_found":
        return f"; add the name, {INCLUDE}"
    if problem["type"] == "string_type" and isinstance(value, int | float):
        return f"; a text needs quotes, as in '{'.'.join(map(str, location))}=\"TEXT\"'"
    if problem["type"] in ("int_type", "float_type", "bool_type") and str(value).startswith("${oc.env:"):
        return f"; a variable holds text, write ${{oc.decode:{value}}}"
    if problem["type"] not in ("dict_type", "model_type") or any(isinstance(part, int) for part in location):
        return ""
    key = ".".join(map(str, location))
    if isinstance(value, str) and (CONF / key).is_dir():  # a group, in the user's experiment
        return f"; choose the option in its defaults, as `override /{key}: {value}`"
    return f"; give them one by one, as in {key}.{next(iter(_keys(location)), 'NAME')}=VALUE"


def _keys(location: tuple[int | str, ...]) -> list[str]:
    """Return the keys of a section, or of an item of a list; empty for a backend, whose class depends on its name."""
    section: Any = Config
    for part in location:
        if isinstance(part, str):
            field = getattr(section, "model_fields", {}).get(part)
            kinds = (field.annotation, *get_args(field.annotation)) if field else ()
            section = next((kind for kind in kinds if hasattr(kind, "model_fields")), None)
    return list(section.model_fields) if section and location[:1] != ("backend",) else []


def _plain(problem: ErrorDetails) -> str:
    """Return pydantic's text of a problem, or plainer words for texts that name Python's types."""
    kind, text = problem["type"], problem["msg"]
    if kind == "string_pattern_mismatch":
        return NAMES.get(problem["ctx"]["pattern"], f"{text[0].lower()}{text[1:]}")
    if kind in KINDS:
        return f"must be {KINDS[kind]}"
    return f"{text[0].lower()}{text[1:]}"


def _unknown(location: tuple[int | str, ...], composed: DictConfig) -> str:
    name = str(location[-1])
    if location[0] == "backend" and len(location) == 2 and (owners := backends_with(name)):
        return f"the backend here has no such key; choose one that has: {owners}"
    if len(location) == 1:
        if name in NO_KEYS:
            return f"unknown key; {NO_KEYS[name]}"
        sections: Any = OmegaConf.to_container(composed)
        others = {part: section for part, section in sections.items() if part not in (name, "hydra")}
        keys = {key for place, _ in leaves(others) for key in accumulate(place.split("."), "{}.{}".format)}
        meant = name.replace("/", ".")
        places = [key for key in sorted(keys) if f".{key}".endswith(f".{meant}")] or get_close_matches(meant, keys, 1, 0.9)
        if name in places:  # of a file, where a dot does not divide a key
            nested = name.replace(".", ": {") + ": VALUE" + "}" * name.count(".")
            return f"unknown key, because no dot divides keys in a file; write {nested}"
        if 0 < len(places) <= MAX_PLACES:
            return f"unknown key, did you mean {' or '.join(places)}?"
    siblings = OmegaConf.select(composed, ".".join(map(str, location[:-1]))) or ()
    choices = _keys(location[:-1]) or [str(key) for key in siblings if key not in (name, "name")]
    return f"unknown key{suggest(name, choices)}"


def backends_with(name: str) -> str:
    """Return the backends that have a key, as in `backend=vllm, trtllm`; empty if there is none."""
    owners = [option for option, model in backend_configs().items() if name in model.model_fields]
    return f"backend={', '.join(owners)}" if owners else ""


def suggest(value: str, choices: Sequence[str]) -> str:
    """Return the hint after an invalid value: the choice that it resembles or that has most of its words, or all choices."""
    text = value.lower().replace("-", "_")
    words = set(re.findall(r"[^\W_]+", text))
    counts = {choice: choice.count("_") for choice in choices if words.issuperset(choice.split("_"))}
    most = [choice for choice, count in counts.items() if count == max(counts.values())]
    close = get_close_matches(text, choices, 1, 0.9) or most or get_close_matches(text, choices, 1, 0.75)
    if len(close) == 1:
        return f", did you mean {close[0]}?"
    return f"; choose one of {', '.join(choices)}" if choices else ""
