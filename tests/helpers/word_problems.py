"""Two problems in the form of GSM8K, for tests without its data."""

import json
from pathlib import Path

PROBLEMS = (
    (
        "A shelf costs $1,200 and a lamp a quarter of it. What do both cost?",
        "The lamp costs 1,200/4=$<<1200/4=300>>300.\nBoth cost 1,200+300=$<<1200+300=1500>>1,500.\n#### 1500",
    ),
    ("Tom has 7 figs and eats half of one. How many are left?", "7-.5=<<7-.5=6.5>>6.5 figs are left.\n#### 6.5"),
)
RESULTS = (["300", "1,500", "1500"], ["6.5", "6.5"])
"""What is scored of each."""


def write_problems(path: Path) -> Path:
    """Write the problems as the package with GSM8K's data has them."""
    lines = [json.dumps({"question": question, "answer": solution}) + "\n" for question, solution in PROBLEMS]
    path.write_text("".join(lines), encoding="utf-8")
    return path
