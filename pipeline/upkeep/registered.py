"""What the tracking store says of the engines of a work directory: versions, aliases, moves. Nothing in it changes."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from pipeline.registry.tracking import Location
from pipeline.trust.history import History, read_history
from pipeline.trust.keys import Keys

MODEL_PATH = "model.path"
"""Parameter of a candidate's run: the checkpoint that it was judged on."""


@dataclass(frozen=True)
class Version:
    """A version of a registered model."""

    model: str
    """The registered model's name: `kvgate-tiny`."""
    number: str
    run_id: str
    tags: Mapping[str, str]
    made: float
    """When it was registered, in seconds since 1970."""

    @property
    def identity_digest(self) -> str:
        """sha256 of the identity.json that it cites."""
        return self.tags.get("identity_digest", "")

    def __str__(self) -> str:
        return f"version {self.number} of {self.model} ({self.tags.get('kv', 'no name')})"


@dataclass(frozen=True)
class Model:
    """A registered model: its versions, and where its aliases point."""

    name: str
    versions: Mapping[str, Version]
    """By number."""
    aliases: Mapping[str, str]
    """Alias -> version, as the registry has it."""
    history: History
    """The log of moves, which decides where aliases belong."""

    @property
    def pointed_at(self) -> dict[str, Version]:
        """Alias -> version, as servers read it; where the log of moves has another, that is `ALIAS (log of moves)`."""
        found = {alias: self.versions[number] for alias, number in self.aliases.items() if number in self.versions}
        for alias, number in self.history.aliases.items():
            if number is not None and number != self.aliases.get(alias) and number in self.versions:
                found[f"{alias} (log of moves)"] = self.versions[number]
        return found


@dataclass(frozen=True)
class Registered:
    """What a tracking store knows."""

    models: tuple[Model, ...] = ()
    left_running: tuple[str, ...] = ()
    """Runs of the experiment that are RUNNING although their process died; the next command that tracks closes them."""
    checkpoints: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """(model, version) -> `model.path` that it was judged with, of versions that an alias points at."""


def read_registered(location: Location, identities: Collection[str]) -> Registered:
    """Read what a tracking store knows of engines: those of the configured model, and of each model that cites an identity.

    Args:
        location: The store. Of a SQLite file that does not exist nothing is read, and none is made.
        identities: sha256 of identities that lie in the work directory.

    Raises:
        UserError, MissingRequirement: when the store cannot be read.
    """
    if location.file is not None and not location.file.is_file():
        return Registered()
    from pipeline.registry.mlflow_client import Client, MlflowException
    from pipeline.registry.mlflow_runs import left_open

    client = Client(location)
    names = {location.model_name}
    for digest in identities:
        names |= {str(one.name) for one in client.search_model_versions(f"tags.identity_digest = '{digest}'")}
    models, checkpoints = [], {}
    for name in sorted(names):
        try:
            model = client.get_registered_model(name)
        except MlflowException:  # nothing was registered yet
            continue
        versions = {
            str(one.version): Version(name, str(one.version), one.run_id or "", one.tags, one.creation_timestamp / 1000)
            for one in client.search_model_versions(f"name = '{name}'")
        }
        aliases = {alias: str(number) for alias, number in model.aliases.items()}
        models.append(Model(name, versions, aliases, read_history(model.tags, Keys())))
        for version in models[-1].pointed_at.values():
            try:
                path = client.get_run(version.run_id).data.params.get(MODEL_PATH)
            except MlflowException:  # it was deleted
                continue
            if path is not None:
                checkpoints[name, version.number] = path
    experiment = client.get_experiment_by_name(location.experiment)
    left = left_open(client, experiment.experiment_id, location) if experiment is not None else ()
    return Registered(tuple(models), tuple(name for _, name, _ in left), checkpoints)
