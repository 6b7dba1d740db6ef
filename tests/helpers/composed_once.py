"""Hydra composes the same groups of conf/ once in a process: a thousand tests compose them, with values of their own."""

from copy import copy, deepcopy
from typing import Any

from hydra._internal import config_loader_impl
from hydra._internal.defaults_list import DefaultsList
from omegaconf import DictConfig


def compose_once() -> None:
    """Keep which files a command's groups name, and what the files give together; the next command with these gets a copy."""
    module: Any = config_loader_impl
    Loader: Any = module.ConfigLoaderImpl
    choose, compose = module.create_defaults_list, Loader._compose_config_from_defaults_list
    chosen, composed = dict[Any, DefaultsList](), dict[str, DictConfig]()

    def chosen_once(repo: Any, config_name: str, overrides_list: list[Any], **how: bool) -> Any:
        values = [one for one in overrides_list if not one.is_sweep_override() and not repo.group_exists(one.key_or_group)]
        groups = tuple(one.input_line for one in overrides_list if one not in values)
        sources = tuple((source.provider, source.path) for source in repo.get_sources())
        key = (config_name, groups, sources, *how.values())
        if any(isinstance(one.value(), dict) for one in overrides_list if one not in values):
            return choose(repo=repo, config_name=config_name, overrides_list=overrides_list, **how)
        if key not in chosen:
            chosen[key] = choose(repo=repo, config_name=config_name, overrides_list=overrides_list, **how)
        found = copy(chosen[key])
        found.config_overrides = values
        return found

    def composed_once(loader: object, defaults: list[Any], repo: Any) -> DictConfig:
        key = repr((defaults, [(source.provider, source.path) for source in repo.get_sources()]))
        if key not in composed:
            composed[key] = compose(loader, defaults, repo)
        return deepcopy(composed[key])

    module.create_defaults_list, Loader._compose_config_from_defaults_list = chosen_once, composed_once
