"""kvgate's light half: command line, typed config, artifact store, gates and tracking. Nothing here imports torch."""

__version__ = "0.1.0"
