"""Finds the checkpoints and files that a command names but that do not exist, so that one error reports all missing paths."""

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from pipeline.config.stages import StageFacts
from stages.checkpoints.places import absence, locate_checkpoint
from stages.core.errors import MissingRequirement, UserError, short

MODEL = "model.path"
FILES = ("workloads.jsonl", "workloads.documents", "calibration.jsonl")
"""Keys that name files. The stages that make artifacts read these files."""


def missing_files(facts: StageFacts, values: Mapping[str, object]) -> list[str]:
    """Return a line for each path in `values` (key -> value) that a stage reads and that does not exist."""
    lines, model = [], values.get(MODEL)
    if isinstance(model, str) and "${" not in model and (facts.makes or facts.plans):
        try:
            path = locate_checkpoint(model)
            if not path.exists():
                lines.append(f"{MODEL}={path}: {absence(path)}")
        except UserError as error:
            lines.append(str(error))
        except (MissingRequirement, OSError):  # reported when the checkpoint is read
            pass
    for key in FILES if facts.makes else ():
        given = values.get(key)
        with suppress(OSError):  # such as a name that is too long
            if isinstance(given, str) and "${" not in given and not os.path.lexists(file := Path(given).expanduser()):
                lines.append(f"{key}={short(file, 200)}: no such file; give one that exists")
    return lines
