"""The model `kvgate` of lm-evaluation-harness: an engine bundle, scored by forced decode.

lm-eval's own backends score a text in one prefill, whose attention reads unquantized keys and values. Here the logits of a
scored token come from decode steps, which read the quantized cache. The only exception is a token with a context of one token:
no decode step is possible, so the logits of the prefill are used. This affects the first token after an empty context and the
first token of a rolling window.

Source: https://github.com/EleutherAI/lm-evaluation-harness (lm_eval/api/model.py: LM, TemplateLM)
"""

from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from scipy.special import log_softmax
from tqdm import tqdm

from pipeline.api.engines import load
from stages.checkpoints.loading import load_tokenizer
from stages.core.errors import UserError, short
from stages.core.records import Sample
from stages.engines.interface import LOGITS_NOT_FINITE, Engine, SupportsRequests
from stages.evaluate.decoding.decode import DecodeStep, decode
from stages.evaluate.inputs.tokens import EncodedSample
from stages.workloads.prompts import rendered, token_ids

TAIL_MARGIN = 8
"""Additional tokens at an answer's end to search for a stop string, which itself has at most one token per byte."""
MAX_PATH = 4095
"""Maximum characters of a path on Linux."""

__all__ = ["KvgateLM", "cli_evaluate"]

_NO_SAMPLE = Sample(id="lm-eval", workload="lm_eval", reference="", check="none")
"""Placeholder sample: lm-eval checks answers itself, so a request has only tokens."""


@register_model("kvgate")
class KvgateLM(TemplateLM):  # type: ignore[misc]  # lm_eval has no types
    """An engine bundle of any backend as a model of lm-eval, with the bundle's tokenizer.

    Legend: B = sequences of a decode step, V = vocab_size.
    """

    def __init__(
        self,
        bundle: str = "",
        batch_size: int | str = 1,
        max_length: int = 2048,
        max_gen_toks: int = 256,
        device: str | None = None,  # noqa: ARG002
        **options: Any,
    ) -> None:
        """Load the engine.

        Args:
            bundle: The directory that stage=build prints.
            batch_size: Maximum sequences per decode step; lm-eval's `--batch_size`.
            max_length: Maximum tokens per sequence; longer contexts lose their oldest tokens.
            max_gen_toks: Maximum tokens of a generated answer, unless the task sets another limit.
            device: Ignored, because lm-eval always passes cuda:0. `backend.device` sets the engine's device.
            options: Keys of the bundle's backend, for example `backend.threads=2`.
        """
        super().__init__()
        if not bundle or len(bundle) > MAX_PATH:
            raise UserError(f"bundle={short(bundle)}: is not a path; give --model_args bundle=DIR, the directory of an engine")
        self.batch_size = _at_least(1, "batch_size", batch_size)
        self.max_length = _at_least(2, "max_length", max_length)
        self.max_gen_toks = _at_least(1, "max_gen_toks", max_gen_toks)
        loaded = load(bundle, **options)
        self.engine: Engine = loaded.engine
        self.tokenizer = load_tokenizer(loaded.bundle)
        self._ends = set(loaded.tokenizer.ends)

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """The token that precedes a text without a context: bos, or eos if the tokenizer has no bos."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return a conversation as text. Without `add_generation_prompt` the last message stays open for continuation."""
        if not self.tokenizer.chat_template:
            raise UserError("--apply_chat_template: the bundle's tokenizer has no chat template; leave the flag out")
        text = partial(
            self.tokenizer.apply_chat_template,
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return rendered([text])[0]

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return token ids. By default the tokenizer's special tokens are added, but never a second leading bos."""
        if add_special_tokens is None:
            return token_ids(self.tokenizer, string)
        return list(self.tokenizer(string, add_special_tokens=add_special_tokens)["input_ids"])

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each text. Every token is scored exactly once.

        A text is cut into windows of `max_length` tokens. The context of the first window is `prefix_token_id`, and of later
        windows the previous window's last token. The last window's context is long enough to fill the window.
        """
        texts = [request.args[0] for request in requests]
        rolled = (get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.max_length, 1) for text in texts)
        windows = [list(map(make_disjoint_window, of_text)) for of_text in rolled]
        scores = iter(self._scores([window for of_text in windows for window in of_text], disable_tqdm))
        totals = [sum(next(scores)[0] for _ in of_text) for of_text in windows]
        for text, total in zip(texts, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the greedy answer to each context, up to the first stop string."""
        settings = [normalize_gen_kwargs(request.args[1], self.max_gen_toks) for request in requests]
        if any(setting["do_sample"] for setting in settings):
            raise UserError("do_sample=true: the model kvgate generates greedily; give --gen_kwargs do_sample=false")
        limits = [setting["max_gen_toks"] for setting in settings]
        if max(limits, default=0) >= self.max_length:
            raise UserError(f"max_gen_toks={max(limits)}: leaves no room for a context in max_length={self.max_length} tokens")
        prompts = [
            (self.tok_encode(request.args[0]) or [self.prefix_token_id])[limit - self.max_length :]
            for request, limit in zip(requests, limits, strict=True)
        ]
        completed = self._answers(prompts, limits, [setting["until"] for setting in settings])
        answers = dict(tqdm(completed, total=len(prompts), desc="kvgate: answers", disable=disable_tqdm))
        for i, request in enumerate(requests):
            self.cache_hook.add_partial("generate_until", request.args, answers[i])
        return [answers[i] for i in range(len(prompts))]

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        results = self._scores([(context, continuation) for _, context, continuation in requests], disable_tqdm)
        for (key, *_tokens), result in zip(requests, results, strict=True):
            self.cache_hook.add_partial("loglikelihood", key, result)
        return results

    def _scores(self, pairs: Sequence[tuple[list[int], list[int]]], disable_tqdm: bool) -> list[tuple[float, bool]]:
        """Score each pair (context, continuation): log-likelihood, and whether the continuation is greedy."""
        if max((len(scored) for _, scored in pairs), default=0) > self.max_length:
            raise UserError(f"max_length={self.max_length}: a continuation is longer; give the model a larger max_length")
        totals = np.zeros(len(pairs))
        greedy = np.ones(len(pairs), dtype=bool)
        with tqdm(total=sum(len(scored) for _, scored in pairs), desc="kvgate: tokens", disable=disable_tqdm) as progress:
            for rows, tokens, logits_BV in self._forced(pairs):
                logp_BV = log_softmax(_finite(logits_BV).astype(np.float64), axis=1)
                # A one-pass engine returns several rows of one text in a step.
                np.add.at(totals, rows, logp_BV[np.arange(len(rows)), tokens])
                np.logical_and.at(greedy, rows, logp_BV.argmax(axis=1) == tokens)
                progress.update(len(rows))
        return [(float(total), bool(is_greedy)) for total, is_greedy in zip(totals, greedy, strict=True)]

    def _forced(self, pairs: Sequence[tuple[list[int], list[int]]]) -> Iterator[tuple[list[int], list[int], Any]]:
        """Yield (pair index per row, scored token per row, logits (B, V))."""
        owners: list[int] = []
        encoded: list[EncodedSample] = []
        for i, (context, scored) in enumerate(pairs):
            # The last scored token is never fed to the engine, so the context may be one token longer.
            prompt, reference = (context or [self.prefix_token_id])[len(scored) - 1 - self.max_length :], scored
            if len(prompt) == 1 and reference:
                handles, logits_BV = self.engine.prefill([prompt])
                self.engine.release(handles)
                yield [i], reference[:1], logits_BV
                prompt, reference = [*prompt, reference[0]], reference[1:]
            if reference:
                owners.append(i)
                encoded.append(EncodedSample(_NO_SAMPLE, tuple(prompt), tuple(reference)))
        for step in decode(self.engine, encoded, self.batch_size):
            if not isinstance(step, DecodeStep):
                continue
            tokens = [encoded[token.sample].reference[token.position] for token in step.tokens]
            yield [owners[token.sample] for token in step.tokens], tokens, step.logits_BV

    def _answers(self, prompts: list[list[int]], limits: list[int], stops: list[list[str]]) -> Iterator[tuple[int, str]]:
        """Yield (prompt index, greedy answer) as soon as an answer is complete, cut before its first stop string.

        The next prompt immediately takes the free place in the batch. An engine that serves whole requests would run such a
        prompt alone, so its next prompts start together after the whole batch has ended.
        """
        # Prompts of similar length run together, because a decode step costs the pages of its longest sequence.
        waiting = deque(sorted(range(len(prompts)), key=lambda i: len(prompts[i])))
        live: dict[int, int] = {}
        answers: list[list[int]] = [[] for _ in prompts]
        while waiting or live:
            rows: dict[int, Any] = {}
            places = 0 if live and isinstance(self.engine, SupportsRequests) else self.batch_size - len(live)
            joining = [waiting.popleft() for _ in range(min(places, len(waiting)))]
            if joining:
                # The last token of a prompt is decoded, except for prompts of one token, which can only be prefilled.
                handles, logits_BV = self.engine.prefill([prompts[i][:-1] or prompts[i] for i in joining])
                live |= zip(joining, handles, strict=True)
                rows = {i: logits_V for i, logits_V in zip(joining, logits_BV, strict=True) if len(prompts[i]) == 1}
            fed = {i: (answers[i] or prompts[i])[-1] for i in live if i not in rows}
            if fed:
                logits_BV = self.engine.decode([live[i] for i in fed], list(fed.values()))
                rows |= zip(fed, logits_BV, strict=True)
            for i, logits_V in rows.items():
                token = int(_finite(logits_V).argmax())
                if token not in self._ends:
                    answers[i].append(token)
                if token in self._ends or len(answers[i]) >= limits[i] or self._has_stop(answers[i], stops[i]):
                    self.engine.release([live.pop(i)])
                    yield i, postprocess_generated_text(self._text(answers[i]), stops[i], None)

    def _has_stop(self, answer: list[int], stops: Sequence[str]) -> bool:
        """Return whether the last token of an answer completed a stop string. Call it after every token.

        Only the last tokens are decoded, and the whole answer if they contain a stop string: decoding the whole answer after
        every token would take quadratic time.
        """
        # A token has at least one byte of text, unless it is special. The margin covers such tokens and cut characters.
        tail = answer[-max((len(stop.encode()) for stop in stops), default=0) - TAIL_MARGIN :]
        return all(any(stop and stop in self._text(tokens) for stop in stops) for tokens in (tail, answer))

    def _text(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def _finite(logits: Any) -> Any:
    if not np.isfinite(logits).all():
        raise UserError(f"a task's logits are {LOGITS_NOT_FINITE}")
    return logits


def _at_least(minimum: int, name: str, value: int | str) -> int:
    try:
        number = int(value)
    except (TypeError, ValueError):
        number = 0
    if number < minimum:
        raise UserError(f"{name}={value}: must be a whole number, {minimum} or more")
    return number
