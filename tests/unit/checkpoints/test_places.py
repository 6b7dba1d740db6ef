"""The short name of a model."""

import pytest

from stages.checkpoints.places import checkpoint_label


@pytest.mark.parametrize(
    ("path", "label"),
    [
        ("/models/Llama-3.1-8B", "Llama-3.1-8B"),
        ("/models/Llama-3.1-8B/", "Llama-3.1-8B"),
        ("/cache/hub/models--meta-llama--Llama-3.1-8B/snapshots/0e9e39f249a16976", "Llama-3.1-8B"),
        ("/backups/snapshots/monday", "monday"),
        ("/models/SmolLM2.Q4_1.gguf", "SmolLM2.Q4_1"),
        ("pkg://stages.tiny/checkpoint", "tiny"),
    ],
)
def test_a_model_is_named_after_its_source(path: str, label: str) -> None:
    assert checkpoint_label(path) == label
