"""Composition of command-line overrides into validated configurations. All jobs of a sweep are checked before the launch."""

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice, product
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import ConfigCompositionException, HydraException
from hydra.types import RunMode
from hydra.version import VersionBase
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, MissingMandatoryValue, OmegaConfBaseException
from omegaconf.errors import ValidationError as OmegaValidationError
from pydantic import ValidationError

from pipeline.config import CONF
from pipeline.config.config import STAGES, Config, StageFacts
from pipeline.config.explain import explain_validation
from pipeline.config.options import AUTO, AUTO_OPTIONS, TINY, check_name
from pipeline.config.override_syntax import as_typed, is_hydras, key_of
from pipeline.config.overrides import (
    BASIC,
    LAUNCHER,
    LAUNCHER_KEYS,
    MAX_JOBS,
    OPTION,
    SEARCHPATH,
    check_installed,
    problem_of,
    readable,
    refuse_code,
    searching,
)
from stages.core.errors import UserError, short
from stages.core.redaction import holds_secret, leaves, redact_text
from stages.policies.policy import KVPolicy
from stages.verdict.verdict import Status, Thresholds

# Options whose values are defaults in the code, not files of conf/.
ConfigStore.instance().store("default", Thresholds().model_dump(mode="json"), group="gates")
_OPTIONAL = {name: key.default for name, key in KVPolicy.model_fields.items() if not key.is_required()}
ConfigStore.instance().store("policy", _OPTIONAL)

TRACKING_URI = "tracking.uri"
EXISTING = "give it a value, or name a key that exists or ${oc.env:NAME}, a variable (an experiment may need its own backend)"
"""Fix for an interpolation that cannot be resolved."""
MAX_SHOWN_CHARACTERS = 400
"""Maximum characters of a command in a message."""
MAX_KEY, MAX_CHARACTERS = 200, 1 << 15
"""Maximum characters of a key (Hydra takes it for a file name) and of an override (Hydra would parse it for minutes)."""


def to_config(composed: DictConfig) -> Config:
    """Validate a composed configuration; its node `hydra` is ignored. Raises UserError with one line per problem."""
    ours = OmegaConf.masked_copy(composed, [str(key) for key in composed if key != "hydra"])
    try:
        list(ours.values())  # first, so that seed=${nope} is a problem of seed, not of workloads.seed, which refers to it
        values = OmegaConf.to_container(ours, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        raise UserError(f"{error.full_key}: this choice needs a value; give {error.full_key}=VALUE") from error
    except OmegaConfBaseException as error:
        raise UserError(f"{error.full_key or 'config'}: {str(error).splitlines()[0]}; {EXISTING}") from error
    assert isinstance(values, dict)
    _refuse_secrets(values)
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise UserError("\n".join(explain_validation(error, composed))) from error


def _refuse_secrets(value: object, key: str = "") -> None:
    """Raise UserError for values that hold a secret, since configurations are printed, stored with sweeps and logged."""
    for path, leaf in leaves(value, key):
        if path != TRACKING_URI and holds_secret(str(leaf)):  # tracking.uri has its own check
            raise UserError(f"{path}: holds a password or a key, and configurations are printed and logged; leave it out")


@dataclass(frozen=True)
class Plan:
    """The validated jobs of one command line."""

    jobs: list[Config]
    job_overrides: tuple[list[str], ...]
    sweeping: bool = False
    swept_keys: tuple[str, ...] = ()
    """Keys that differ between the jobs of a sweep."""
    launcher: str = BASIC
    launcher_overrides: tuple[str, ...] = ()
    """Overrides of the whole sweep, from which a launcher composes its own configuration."""
    arguments: tuple[str, ...] | None = None
    """The user's arguments, for repetition in a next command; None if kvgate is called from Python."""

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Display names of the jobs' candidates: the policy, its changed keys, and the keys that differ within the sweep."""
        prefixes = ("kv.", *(f"{key}=" for key in self.swept_keys if key != "kv"))
        lines = ([part.lstrip("+").replace("'", "") for part in line] for line in self.job_overrides)
        changes = ([part for part in line if part.startswith(prefixes)] for line in lines)
        return tuple(" ".join([job.kv.name, *parts]) for job, parts in zip(self.jobs, changes, strict=True))

    @property
    def accepted(self) -> set[Status]:
        """Verdicts with which the command exits with 0: also INCONCLUSIVE if all jobs are quick checks, which never pass."""
        return {"PASS", "INCONCLUSIVE"} if all(job.workloads.is_quick_check for job in self.jobs) else {"PASS"}


def plan(overrides: Sequence[str], multirun: bool, folders: Sequence[str | Path] = ()) -> Plan:
    """Compose and validate the configurations of all jobs before the first job runs. Raises UserError with all problems.

    `folders` are the folders of `--config-dir`, with the user's own options.
    """
    _refuse_locale([*overrides, *map(str, folders)])
    places = searching(folders)
    for override in overrides:
        _refuse_override(override)
    with initialized():
        with _explained(overrides):
            # with the loader, the parser can expand kv=glob(*)
            loader: Any = SimpleNamespace(get_group_options=lambda group, **_: _options(group, places))
            parser = OverridesParser.create(loader)
            parsed, problems = _parse(overrides, places, parser)
        try:
            with _explained(overrides):
                planned = _plan_jobs(parsed, multirun, parser)
        except UserError as error:
            problems.append(str(error))
    if problems:
        raise UserError("\n".join(problems))
    for job, name, arguments in zip(planned.jobs, planned.names, planned.job_overrides, strict=True):
        check_name(job.kv, name)
        if job.calibration.jsonl is not None and "calibration.workloads" in map(key_of, arguments):
            raise UserError("calibration.workloads: no texts are generated beside calibration.jsonl; leave one of the two out")
    _refuse_equal_names(planned)
    return replace(planned, arguments=(*(f"--config-dir={folder}" for folder in folders), *overrides))


def _refuse_equal_names(planned: Plan) -> None:
    """Refuse a sweep with two candidates of the same display name: the summary would keep only the last."""
    first: dict[str, int] = {}
    for number, name in enumerate(planned.names, start=1):
        earlier = first.setdefault(name, number)
        if earlier != number:
            fix = "leave one out, or give each policy a name of its own in its file (kv.name names every policy of the sweep)"
            raise UserError(f"jobs {earlier} and {number}: both have the display name {name}; {fix}")


def _refuse_locale(texts: Sequence[str]) -> None:
    """Refuse arguments and directories that the locale cannot express: libraries would fail on them in other ways."""
    encoding = sys.getfilesystemencoding()
    if encoding == "utf-8":
        return
    directories = [f"{name}={os.environ.get(name)}" for name in ("HOME", "TMPDIR")]
    with suppress(FileNotFoundError):  # the current directory was removed
        directories.append(f"current directory={os.getcwd()}")
    for text in (*texts, *directories):
        if not text.isascii():
            problem = f"holds characters outside ASCII, but this locale's encoding is {encoding}; set LC_ALL=C.UTF-8"
            raise UserError(f"{short(redact_text(text), 200)}: {problem}")


def _refuse_override(override: str) -> None:
    """Refuse text that Hydra cannot parse, and secrets, which are not to be printed."""
    key, _, value = override.partition("=")
    if "\0" in override or len(key) > MAX_KEY or len(override) > MAX_CHARACTERS:
        raise UserError(
            f"{short(key)}: holds a null character, or over {MAX_CHARACTERS:,} characters ({MAX_KEY} in its key); shorten it"
        )
    if key.lstrip("+") != TRACKING_URI:
        _refuse_secrets(value, redact_text(key.lstrip("+~")))


@contextmanager
def _explained(overrides: Sequence[str]) -> Iterator[None]:
    """Turn an error of Hydra's parser or composition, whose own text is for developers, into a UserError of one line."""
    try:
        yield
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:  # yaml: a file that an option includes
        cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
        key, text = str(getattr(cause, "full_key", None) or ""), str(cause).replace("composing config:\n", "composing config: ")
        problem = text.splitlines()[0].removesuffix(".")
        place = key or short(redact_text(" ".join(overrides)), MAX_SHOWN_CHARACTERS)
        fix = "write KEY=VALUE with a key and an option that exist"
        if key:
            fix = "give a value of its type, as in [VALUE,VALUE] or {NAME: VALUE}"
        if isinstance(cause, InterpolationResolutionError):
            fix = EXISTING
        if key.startswith(LAUNCHER_KEYS) and not isinstance(cause, OmegaValidationError):
            fix = f"choose the launcher with hydra/launcher=NAME, or write +{key}=VALUE to pass it on"
        elif problem.startswith(("In '", "Multiple values")):  # in a file of --config-dir
            fix = "give each item of defaults an option that exists, another group's as `override /GROUP: OPTION`"
            fix = "give each key a value of its type" if "Cannot merge" in problem else fix
            place = "--config-dir"
        raise UserError(f"{place}: {problem}; {fix}") from error
    except RecursionError:
        deepest = max(overrides, key=lambda override: override.count("[") + override.count("{"), default="")
        raise UserError(f"{short(deepest.partition('=')[0])}: is nested too deeply; use fewer levels") from None


def _parse(overrides: Sequence[str], places: list[str], parser: OverridesParser) -> tuple[list[Override], list[str]]:
    """Return the overrides in `places` and the valid `overrides`, and one line for each invalid override."""
    parsed = parser.parse_overrides([_added(readable(override, parser)) for override in overrides])
    checked = [(override, problem_of(override, lambda key: _options(key, places))) for override in parsed]
    sound = [override for override, problem in checked if problem is None]
    return [*parser.parse_overrides(places), *sound], [problem for _, problem in checked if problem is not None]


def _plan_jobs(overrides: list[Override], multirun: bool, parser: OverridesParser) -> Plan:
    plain, composed = _compose_suited([str(o.input_line) for o in overrides if not o.is_sweep_override()])
    launcher = str(composed.hydra.runtime.choices[LAUNCHER])
    if any(o.key_or_group == SEARCHPATH for o in overrides):
        check_installed(launcher)
        typed = {o.key_or_group: str(o.input_line) for o in overrides if is_hydras(o.key_or_group)}
        overrides_of_others = [line for key, line in typed.items() if key not in (SEARCHPATH, LAUNCHER)]
        refuse_code(composed.hydra, _composed([f"{LAUNCHER}={launcher}", *overrides_of_others]).hydra)
    if multirun or composed.hydra.mode == RunMode.MULTIRUN:
        return replace(_sweep(overrides, composed.hydra, parser), launcher=launcher)
    for key in _swept(composed.hydra):
        raise UserError(f"hydra.sweeper.params.{key}: is read only with -m; add it, or write `mode: MULTIRUN` next to sweeper")
    first = next((o for o in overrides if o.is_sweep_override()), None)
    if first is not None:
        swept = as_typed(str(first.input_line))
        fix = "a list has brackets, and a text with commas quotes, as in 'KEY=\"TEXT, TEXT\"'"
        raise UserError(f"{swept}: several values need a sweep; add -m, or give one value: {fix}")
    if launcher != BASIC:
        raise UserError(f"hydra/launcher={launcher}: runs the jobs of a sweep; add -m")
    return Plan([to_config(composed)], (plain,))


def _sweep(overrides: list[Override], hydra: DictConfig, parser: OverridesParser) -> Plan:
    """Return the jobs of a sweep over the parameters of `hydra.sweeper` and of the overrides, which take precedence."""
    lines = [str(o.input_line) for o in overrides]
    parameters = parser.parse_overrides([f"{key}={value}" for key, value in _swept(hydra).items()])
    ours = [o for o in [*parameters, *overrides] if not is_hydras(o.key_or_group)]
    last = {o.key_or_group: o for o in ours}
    swept_keys = tuple(key for key, override in last.items() if override.is_sweep_override())
    hydras = [line for line, o in zip(lines, overrides, strict=True) if is_hydras(o.key_or_group)]
    jobs, job_overrides = _configs(([*hydras, *job] for job in _jobs(ours)), _swept(hydra))
    alone = next((job for job in jobs if not job.facts.sweepable), None)
    if alone is not None:
        raise UserError(f"stage={alone.stage}: cannot be a job of a sweep; leave out -m and experiment=")
    return Plan(jobs, job_overrides, sweeping=True, swept_keys=swept_keys, launcher_overrides=tuple(lines))


def _composed(overrides: Sequence[str]) -> DictConfig:
    """Compose the configuration, including its node `hydra`."""
    try:
        return compose("config", overrides=list(overrides), return_hydra_config=True)
    except ValueError as error:  # Hydra's, for the form of a defaults list, which only a user's file can have wrong
        raise ConfigCompositionException(f"In 'defaults' of a file: {error}") from error


def _compose_suited(overrides: list[str]) -> tuple[list[str], DictConfig]:
    """Compose a job's configuration, including its node `hydra`, and replace `auto` by the options that suit the model."""
    composed = _composed(overrides)
    groups = [group for group in AUTO_OPTIONS if composed.hydra.runtime.choices[group] == AUTO]
    makes = STAGES.get(composed.get("stage"), StageFacts()).makes
    if groups and makes and OmegaConf.select(composed, "model.path") != TINY:
        others = [override for override in overrides if override not in [f"{group}={AUTO}" for group in groups]]
        overrides = [*others, *(f"{group}={AUTO_OPTIONS[group][1]}" for group in groups)]
        composed = _composed(overrides)
    return overrides, composed


def _swept(hydra: DictConfig) -> dict[str, Any]:
    return dict(hydra.sweeper.params or {})


def _configs(jobs: Iterable[list[str]], swept: dict[str, Any]) -> tuple[list[Config], tuple[list[str], ...]]:
    """Compose and validate all jobs; return them with the overrides after resolving `auto`.

    A job whose experiment has another sweep than `swept` is refused, because that sweep would be ignored.
    """
    configs, suited, problems = [], [], list[str]()
    for overrides in jobs:
        try:
            whole, composed = _compose_suited(overrides)
            if _swept(composed.hydra) != swept:
                raise UserError(f"experiment={composed.hydra.runtime.choices.experiment}: is a sweep itself; give it alone")
            configs.append(to_config(composed))
            suited.append(whole)
        except UserError as error:
            problems += str(error).splitlines()
    if problems:
        raise UserError("\n".join(dict.fromkeys(problems)))
    return configs, tuple(suited)


def configurations(planned: Plan) -> Iterator[str]:
    """Yield every job's configuration as a YAML document for `--cfg job`; in a sweep, a comment lists the job's overrides."""
    with initialized():
        for number, overrides in enumerate(planned.job_overrides, start=1):
            arguments = " ".join(map(as_typed, overrides))
            head = f"---\n# job {number} of {len(planned.job_overrides)}: {arguments}\n" if planned.sweeping else ""
            yield head + OmegaConf.to_yaml(compose("config", overrides=overrides))


@contextmanager
def initialized() -> Iterator[None]:
    """Initialize Hydra for kvgate, and restore the previous state of Hydra, which the calling application may use too."""
    state = GlobalHydra.instance()
    theirs, base = state.hydra, copy(VersionBase.instance())
    state.clear()
    try:
        with initialize_config_dir(str(CONF), job_name="kvgate", version_base="1.3"):
            yield
    finally:
        GlobalHydra.set_instance(state)
        state.hydra = theirs
        VersionBase.set_instance(base)


def _jobs(overrides: list[Override]) -> list[list[str]]:
    """Return every job's overrides: all combinations of the swept values, in the order of Hydra's sweeper.

    Raises UserError for a key without a value, and for more than MAX_JOBS jobs.
    """
    choices: dict[str, list[str]] = {}  # the last value of a key counts, at the position of the first
    for o in overrides:
        key = o.get_key_element()
        if o.is_sweep_override():
            try:
                choices[key] = [f"{key}={value}" for value in islice(o.sweep_string_iterator(), MAX_JOBS + 1)]
            except ValueError as error:  # from Python's range()
                raise UserError(f"{as_typed(str(o.input_line))}: {error}; list the values to sweep") from None
        else:
            choices[key] = [f"{key}={o.get_value_element_as_str()}"]
        if not choices[key]:
            problem = "has no values" if o.is_range_sweep() else "there is no such option"
            raise UserError(f"{as_typed(str(o.input_line))}: {problem}; list the values to sweep")
    if prod(map(len, choices.values())) > MAX_JOBS:
        swept = " ".join(as_typed(str(o.input_line)) for o in overrides if o.is_sweep_override())
        raise UserError(f"{swept}: more than {MAX_JOBS:,} jobs; make several sweeps")
    return [list(job) for job in product(*choices.values())]


def _added(override: str) -> str:
    """Return an override with Hydra's prefix `++` if it sets a plain key, so that validation names all unknown keys at once."""
    key = key_of(override)
    is_special = override.startswith(("+", "~")) or "@" in key or is_hydras(key)
    return override if is_special or _options(key) else f"++{override}"


def _options(key: str, places: Sequence[str] = ()) -> list[str]:
    """Return the options of a group, also of the folders that overrides in `places` add; empty if `key` is not a group."""
    loader = GlobalHydra.instance().config_loader()
    return loader.get_group_options(key, ObjectType.CONFIG, overrides=list(places)) if OPTION.fullmatch(key) else []
