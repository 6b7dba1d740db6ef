"""Options of groups that are no files: what they hold is declared where it is read. Importing this stores them for Hydra."""

from hydra.core.config_store import ConfigStore

from pipeline.verdict.gates import Gates

ConfigStore.instance().store("default", Gates().model_dump(mode="json"), group="gates")
