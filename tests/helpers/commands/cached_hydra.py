"""A cache of Hydra's work: each file of conf/ is read once per process and each choice of groups is composed once.

A thousand tests compose configurations.
"""

import pickle
from copy import copy
from typing import Any

from hydra._internal import config_loader_impl
from hydra._internal.config_repository import CachingConfigRepository, ConfigRepository
from hydra._internal.defaults_list import DefaultsList


def compose_once() -> None:
    """Patch Hydra to cache loaded files, resolved defaults lists and composed configurations. Every command gets a copy.

    Copies are unpickled, which takes a fifth of the time of deepcopy.
    """
    module: Any = config_loader_impl
    Loader: Any = module.ConfigLoaderImpl
    Repository: Any = ConfigRepository
    choose, compose, load = module.create_defaults_list, Loader._compose_config_from_defaults_list, Repository.load_config
    chosen, composed, loaded = dict[Any, DefaultsList](), dict[str, bytes](), dict[Any, bytes]()

    def loaded_once(repository: Any, config_path: str) -> Any:
        key = (config_path, *(source.path for source in repository.sources))
        if key not in loaded:
            loaded[key] = pickle.dumps(load(repository, config_path))
        return pickle.loads(loaded[key])

    def chosen_once(repo: Any, config_name: str, overrides_list: list[Any], **how: bool) -> Any:
        values = [item for item in overrides_list if not item.is_sweep_override() and not repo.group_exists(item.key_or_group)]
        groups = tuple(item.input_line for item in overrides_list if item not in values)
        sources = tuple((source.provider, source.path) for source in repo.get_sources())
        key = (config_name, groups, sources, *how.values())
        if any(isinstance(item.value(), dict) for item in overrides_list if item not in values):
            return choose(repo=repo, config_name=config_name, overrides_list=overrides_list, **how)
        if key not in chosen:
            chosen[key] = choose(repo=repo, config_name=config_name, overrides_list=overrides_list, **how)
        loaded = copy(chosen[key])
        loaded.config_overrides = values
        return loaded

    def composed_once(loader: object, defaults: list[Any], repo: Any) -> Any:
        key = repr((defaults, [(source.provider, source.path) for source in repo.get_sources()]))
        if key not in composed:
            composed[key] = pickle.dumps(compose(loader, defaults, repo))
        return pickle.loads(composed[key])

    def begin(repository: Any, delegate: object) -> None:
        repository.delegate, repository.cache = copy(delegate), {}

    Cached: Any = CachingConfigRepository
    Cached.__init__, Repository.load_config = begin, loaded_once
    module.create_defaults_list, Loader._compose_config_from_defaults_list = chosen_once, composed_once
