"""Every case, by kind."""

from bad_input import configuration, models, work

CASES = [*configuration.CASES, *models.CASES, *work.CASES]
