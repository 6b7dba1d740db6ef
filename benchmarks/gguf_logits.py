"""A converted Gemma 3 beside llama.cpp on the GGUF itself: token ids of texts in many scripts, and logits past its windows.

    pip install --target work/peers/llama_cpp --no-deps llama-cpp-python==0.3.36 diskcache
    PYTHONPATH=work/peers/llama_cpp python -m benchmarks.gguf_logits --json benchmarks/results/gguf_gemma3.json

llama.cpp rounds what it multiplies weights with to 8 bits, so that it runs twice: on the file as it is, and on the same weights
as float32. What lies between these two is llama.cpp's own rounding. tests/long/test_gemma3.py holds the conversion against what
the results file records of llama.cpp.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.benchlib import load_model
from benchmarks.documentation import GEMMA3, converted
from benchmarks.recording import log, results_record, write_json
from pipeline.checkpoint.places import locate_checkpoint
from stages.checkpoints import load_tokenizer
from stages.evaluate.distances.distance import kl_of_logits, log_softmax

TOKENS, EVERY = 768, 24
"""Of Python's documentation, and how many lie between two positions that are compared; the windows are of 512."""
CHARACTERS = 20_000
"""Of the documentation whose token ids are compared: llama.cpp looks for each of 6,414 special tokens in what others left."""
BEST = 5
"""Most likely tokens of a position that the results file keeps."""

TEXTS = (
    "The quick brown fox jumps over the lazy dog. It's 3.14159, isn't it?",
    "def f(x):\n    if x:\n\t\treturn {'a': [1, 2]}\n\n\n\n        # eight spaces",
    " leading, trailing and   inner     spaces  " + " " * 40 + "forty",
    "Größe, naïve café, Zürich, œuvre, Łódź, señor, İstanbul, ß ẞ",
    "Быстрая коричневая лиса прыгает через ленивую собаку в 2026 году.",
    "Η γρήγορη αλεπού πηδάει πάνω από τον τεμπέλη σκύλο.",
    "敏捷的棕色狐狸跳过了懒狗。価格は1,234円です。カタカナとひらがな。",
    "빠른 갈색 여우가 게으른 개를 뛰어넘습니다.",
    "الثعلب البني السريع يقفز فوق الكلب الكسول ١٢٣٤",
    "השועל החום המהיר קופץ מעל הכלב העצלן.",
    "तेज़ भूरी लोमड़ी आलसी कुत्ते के ऊपर कूदती है।",
    "สุนัขจิ้งจอกสีน้ำตาลกระโดดข้ามสุนัขขี้เกียจ",
    "e\u0301 and é; 👩‍👩‍👧‍👦 🏳️‍🌈 🤽; 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 ∑∫√ ≤ ≠",
    "\ue000\U0010ffff unassigned, \u200b zero width, \ufeff a mark, \u00a0 no break",
    "<start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n<h1>Title</h1><table><tr>",
    "▁ already a blank ▁▁ of SentencePiece, <0x41> a byte's name, <unused7> and [multimodal]",
)

Logits = npt.NDArray[np.float32]


def llama_logits(gguf: Path, tokens: Sequence[int], rows: Sequence[int]) -> Logits:
    """Return llama.cpp's logits at some positions."""
    from llama_cpp import Llama

    engine: Any = Llama(
        str(gguf), n_ctx=len(tokens), logits_all=True, type_k=0, type_v=0, flash_attn=False, n_threads=1, verbose=False
    )
    engine.eval(tokens)
    return np.array(engine.scores[list(rows)])


def as_float32(gguf: Path, out: Path) -> Path:
    """Return a GGUF whose matrices are what a quantized one stands for, in float32, as llama.cpp reads it."""
    import llama_cpp

    if not out.exists():
        options = llama_cpp.llama_model_quantize_default_params()
        options.ftype, options.allow_requantize, options.nthread = llama_cpp.LLAMA_FTYPE_ALL_F32, True, 1
        part = out.with_suffix(".part")
        if llama_cpp.llama_model_quantize(str(gguf).encode(), str(part).encode(), options):
            raise RuntimeError(f"llama.cpp cannot write {gguf} as float32")
        part.rename(out)
    return out


def distance(logits: Logits, reference: Logits) -> dict[str, float]:
    """Return how far logits are from a reference's: KL in nats, and the largest difference over the standard deviation."""
    kl = kl_of_logits(reference, logits)
    largest = np.abs(logits - reference).max(-1) / reference.std(-1)
    return {"mean_kl": float(kl.mean()), "max_kl": float(kl.max()), "max_difference": float(largest.max())}


def main(command_line: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("work/gguf_logits"), help="where the model is converted to")
    parser.add_argument("--json", type=Path, help="the results file")
    arguments = parser.parse_args(command_line)
    torch.set_num_threads(1)
    arguments.work.mkdir(parents=True, exist_ok=True)
    gguf = locate_checkpoint(GEMMA3)
    checkpoint = converted(gguf, arguments.work / "checkpoint")
    from llama_cpp import Llama

    tokenizer, words = load_tokenizer(checkpoint), Llama(str(gguf), vocab_only=True, verbose=False)
    theirs = [words.tokenize(text.encode(), add_bos=True, special=True) for text in TEXTS]
    differ = [text for text, ids in zip(TEXTS, theirs, strict=True) if tokenizer(text)["input_ids"] != ids]
    log(f"{len(TEXTS)} texts, other tokens in {len(differ)}: {differ}")
    pages = "\n\n".join(topics[name] for name in sorted(topics))[:CHARACTERS]
    pages_differ = tokenizer(pages)["input_ids"] != words.tokenize(pages.encode(), add_bos=True, special=True)
    log(f"Python's documentation, other tokens: {pages_differ}")
    tokens: list[int] = tokenizer(pages)["input_ids"][:TOKENS]
    rows = range(EVERY - 1, TOKENS, EVERY)
    exact = llama_logits(as_float32(gguf, arguments.work / "float32.gguf"), tokens, rows)
    stored = llama_logits(gguf, tokens, rows)
    with torch.no_grad():
        ours = load_model(checkpoint)(torch.tensor([tokens]), logits_to_keep=torch.tensor(rows)).logits[0].float().numpy()
    results: list[dict[str, Any]] = [
        {"of": "llama.cpp on the GGUF", "from": "llama.cpp on its weights in float32", **distance(stored, exact)},
        {"of": "kvgate's checkpoint", "from": "llama.cpp on its weights in float32", **distance(ours, exact)},
        {"of": "kvgate's checkpoint", "from": "llama.cpp on the GGUF", **distance(ours, stored)},
    ]
    for result in results:
        log(str(result))
    logs = log_softmax(exact)
    best = np.argsort(-logs, -1)[:, :BEST]
    likely = [[[int(token), round(float(row[token]), 5)] for token in top] for row, top in zip(logs, best, strict=True)]
    facts = {
        "texts": [{"text": text, "ids": ids} for text, ids in zip(TEXTS, theirs, strict=True)],
        "other_ids": len(differ) + pages_differ,
        "tokens": tokens,
        "likely": dict(zip(map(str, rows), likely, strict=True)),
    }
    libraries = ("torch", "transformers", "llama-cpp-python", "gguf", "numpy")
    write_json(arguments.json, results_record(results, libraries, model=gguf.name, **facts))


if __name__ == "__main__":
    main()
