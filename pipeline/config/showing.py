"""`--cfg job`: the configuration of a job or, with -m, of every job of a sweep, as documents of one YAML stream."""

from collections.abc import Iterator

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from pipeline.config import CONF
from pipeline.config.compose import Plan
from pipeline.core.errors import UserError


def configurations(planned: Plan, package: str | None, resolve: bool) -> Iterator[str]:
    """Yield a document for each job; those of a sweep below a comment with what is overridden in it.

    Of `package` (`gates.margins`) only that part is shown. Raises UserError where a job has no such part.
    """
    with initialize_config_dir(str(CONF), version_base="1.3"):
        for number, overrides in enumerate(planned.overrides, start=1):
            composed = compose("config", overrides=overrides)
            shown = OmegaConf.select(composed, package) if package else composed
            if shown is None:
                raise UserError(f"--package={package}: no such part of the configuration; give one that --cfg job shows")
            if resolve and isinstance(shown, DictConfig):
                OmegaConf.resolve(shown)
            text = OmegaConf.to_yaml(shown) if OmegaConf.is_config(shown) else f"{shown}\n"
            head = f"---\n# job {number} of {len(planned.overrides)}: {' '.join(overrides)}\n" if planned.sweeping else ""
            yield head + text
