"""Reads the registered models of a tracking store: versions and aliases."""

from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass

from pipeline.registry.tracking import IDENTITY_TAG, Location, Version


@dataclass(frozen=True)
class RegisteredModel:
    """A registered model: its versions and aliases."""

    name: str
    versions: dict[str, Version]
    aliases: dict[str, str]

    @property
    def pointed_at(self) -> dict[str, Version]:
        """Alias -> version, as servers read it. A version that was deleted from the store has no tags."""
        return {alias: self.versions.get(number, Version(number, {})) for alias, number in self.aliases.items()}


def read_registered(location: Location, identities: Collection[str]) -> list[RegisteredModel]:
    """Read the configured registered model, and each model with a version that cites a given identity.

    If a SQLite file does not exist, nothing is read, and the file is not created.
    """
    file = location.file
    if file is not None and not (file.is_file() and file.stat().st_size):
        return []
    from pipeline.registry.mlflow_client import Client, MlflowException, version_of

    client, models = Client(location), list[RegisteredModel]()
    names = {location.model_name}
    for digest in identities:
        names |= {str(one.name) for one in client.search_model_versions(f"tags.{IDENTITY_TAG} = '{digest}'")}
    for name in sorted(names):
        with suppress(MlflowException):  # nothing was registered yet
            model = client.get_registered_model(name)
            found = client.search_model_versions(f"name = '{name}'")
            versions = {str(one.version): version_of(one) for one in found}
            aliases = {alias: str(number) for alias, number in model.aliases.items()}
            models.append(RegisteredModel(name, versions, aliases))
    return models
