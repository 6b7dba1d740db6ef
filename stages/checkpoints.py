"""The one way to load a checkpoint's model or tokenizer: the files that are named here, and no code of the checkpoint's.

transformers looks for code in the directory that it is given (`custom_generate/`, `auto_map`, templates of other names). So it
is given a folder of its own, with nothing in it but the configuration, the weights and the tokenizer's files.

transformers is imported by the functions, so that importing this module is cheap.
"""

import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline.checkpoint.description import inspect_checkpoint
from pipeline.checkpoint.files import TOKENIZER_FILES


def load_causal_lm(directory: Path, **options: Any) -> Any:
    """Load the causal language model of a checkpoint.

    Args:
        directory: The checkpoint.
        options: More arguments of `from_pretrained`, such as `dtype`.

    Raises:
        UserError: `inspect_checkpoint` refuses the checkpoint.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    quiet: Any = logging.disable_progress_bar  # untyped in transformers
    quiet()
    info = inspect_checkpoint(directory)
    load: Any = AutoModelForCausalLM.from_pretrained
    with _staged(directory, info.other_files, info.weight_files) as staged:
        return load(staged, use_safetensors=True, local_files_only=True, trust_remote_code=False, **options)


def load_tokenizer(directory: Path) -> Any:
    """Load the tokenizer of a checkpoint or of an engine bundle."""
    if _tokenizer_class(directory) == "PreTrainedTokenizerFast":  # AutoTokenizer gives the same, and imports every model
        from transformers import PreTrainedTokenizerFast as AutoTokenizer
    else:
        from transformers import AutoTokenizer

    load: Any = AutoTokenizer.from_pretrained
    with _staged(directory, [name for name in ("config.json", *TOKENIZER_FILES) if (directory / name).is_file()]) as staged:
        return load(staged, local_files_only=True, trust_remote_code=False)


def _tokenizer_class(directory: Path) -> object:
    """Return what the tokenizer's configuration names; None where there is none that can be read."""
    try:
        config = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):  # whoever loads the tokenizer says what is wrong with its files
        return None
    return config.get("tokenizer_class") if isinstance(config, dict) else None


@contextmanager
def _staged(directory: Path, copied: Sequence[str], linked: Sequence[str] = ()) -> Iterator[Path]:
    """Give a folder with copies of small files, and links to large ones, of a directory; it goes with the block."""
    with tempfile.TemporaryDirectory(prefix="kvgate-") as scratch:
        for name in copied:
            shutil.copyfile(directory / name, Path(scratch) / name)
        for name in linked:
            (Path(scratch) / name).symlink_to((directory / name).resolve())
        yield Path(scratch)
