"""kvgate's orchestration: command line, typed configuration, artifact store, the chain of stages, registry and Python API."""

import sys
from pathlib import Path

__version__ = "0.1.0"

# `python -m` puts the current directory first on the import path. This may be a model's directory, whose files are data, not
# code. While Python looks for the program, sys.argv[0] is "-m".
if sys.argv[:1] == ["-m"] and not sys.flags.safe_path and Path(sys.path[0]) != Path(__file__).parents[1]:
    del sys.path[0]
