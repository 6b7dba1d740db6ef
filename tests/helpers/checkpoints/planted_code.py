"""A model directory with code in every place that a library could load code from."""

import json
from pathlib import Path
from typing import Any

PLACES = (
    "custom_generate/generate.py", "modeling_evil.py", "configuration_evil.py", "tokenization_evil.py", "__init__.py",
    "conftest.py", "sitecustomize.py", "usercustomize.py", "hubconf.py", "setup.py", "processing_evil.py",
    "torch.py", "hydra.py", "yaml.py", "mlflow.py", "onnx.py", "modelopt.py", "stages.py", "hydra_plugins/evil.py",
)  # fmt: skip


def changed(path: Path, **values: Any) -> None:
    """Update values of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def plant_code(checkpoint: Path, marker: Path) -> None:
    """Write code that creates `marker` when run, and refer to it wherever a library could look for code."""
    code = f"open({str(marker)!r}, 'a').write(__name__)\ndef generate(*a, **k): raise SystemExit\n"
    for place in PLACES:
        (checkpoint / place).parent.mkdir(exist_ok=True)
        (checkpoint / place).write_text(code)
    classes = {"AutoConfig": "configuration_evil.Evil", "AutoModelForCausalLM": "modeling_evil.Evil"}
    changed(checkpoint / "config.json", auto_map=classes, custom_generate="generate.py")
    tokenizer = {"AutoTokenizer": ["tokenization_evil.Evil", None]}
    changed(checkpoint / "tokenizer_config.json", auto_map=tokenizer, chat_template=None)
    changed(checkpoint / "generation_config.json", custom_generate="custom_generate/generate.py")
    (checkpoint / "requirements.txt").write_text("evil==1.0\n")
