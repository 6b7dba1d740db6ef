"""The one way to load a checkpoint's model or tokenizer: local safetensors and JSON, and no code of the checkpoint's.

transformers is imported by the functions, so that importing this module is cheap.
"""

from pathlib import Path
from typing import Any


def load_causal_lm(directory: Path, **options: Any) -> Any:
    """Load the causal language model of a checkpoint that `inspect_checkpoint` accepted.

    Args:
        directory: The checkpoint.
        options: More arguments of `from_pretrained`, such as `dtype`.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    quiet: Any = logging.disable_progress_bar  # untyped in transformers
    quiet()
    load: Any = AutoModelForCausalLM.from_pretrained
    return load(directory, use_safetensors=True, local_files_only=True, trust_remote_code=False, **options)


def load_tokenizer(directory: Path) -> Any:
    """Load the tokenizer of a checkpoint or of an engine bundle."""
    from transformers import AutoTokenizer

    load: Any = AutoTokenizer.from_pretrained
    return load(directory, local_files_only=True, trust_remote_code=False)
