"""Silences ModelOpt, so that a user sees this stage's progress and nothing else."""

import contextlib
import io
import logging
import sys
import warnings
from collections.abc import Iterator
from typing import TextIO


@contextlib.contextmanager
def quiet() -> Iterator[TextIO]:
    """Silence ModelOpt, which prints, warns and logs about what this stage asserts and validates itself.

    Its prints go to the debug log. Yields the stdout from before.
    """
    stdout, printed = sys.stdout, io.StringIO()
    loggers = [logging.getLogger(name) for name in ("modelopt", "transformers")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings(), contextlib.redirect_stdout(printed):
            warnings.simplefilter("ignore")
            yield stdout
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        logging.getLogger(__name__).debug("%s", printed.getvalue())
