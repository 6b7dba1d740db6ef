"""An engine beside the reference engine on random tokens: what sequences do, and whether the engine keeps to its policy there.

The engine goes first. What it stored of a sequence is looked at before it is freed, and the reference engine replays the
sequences of a scenario together over these codes.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np

from pipeline.core.engine import Engine
from pipeline.core.kv import PAGE_TOKENS
from pipeline.core.workloads import ProbeConfig
from pipeline.verdict.conformance import ComparedRequest, Distance
from pipeline.verdict.coverage import Allocation
from pipeline.verdict.record import or_infinite
from stages.engines.base import Logits
from stages.engines.oracle.attention import Fed
from stages.engines.oracle.replay import Replay
from stages.evaluate.decoding.free import behind, contradiction
from stages.evaluate.decoding.system import allocation
from stages.evaluate.distances.distance import Array
from stages.evaluate.reference.deviation import first_deviation
from stages.evaluate.reference.engine import ReferenceEngine
from stages.evaluate.reference.request import Compared, Request, far_medians, loses_pages, passes, problem_of
from stages.evaluate.reference.sequence import StressSequence

WORST_SHARE = 1 / 8
"""A rounding costs at least this part of what it costs in the worst sequence of the run: sound engines show 65 times its KL."""
UNUSUAL = 30.0
"""Without a rounding to go by: how many times the median sequence's mean KL another sequence's may be ..."""
UNUSUAL_KL = 0.02
"""... and the mean KL that is always allowed then, in nats."""

Distances = tuple[float, float, float]
"""Mean KL of an engine; mean and largest KL of a rounding."""


@dataclass
class StressTest:
    """One run over all scenarios."""

    engine: Engine
    reference: ReferenceEngine
    config: ProbeConfig
    max_tokens: int
    largest: int
    """Sequences of the largest batch."""
    claimed: int
    """Tokens of the longest sample."""
    limit: float
    """Roundings that a sequence may be off, as a request of the forced decode."""
    layers: tuple[float, ...] = ()
    """Errors of the layers that the 16-bit engine stores, where a rounding is measured."""
    seed: int = 0
    scenario: str = ""
    """The scenario that runs."""
    failures: list[str] = field(default_factory=list)
    """Contradictions, refusals, and the influence of other requests."""
    records: list[ComparedRequest] = field(default_factory=list)
    roundings: dict[Any, Distance] = field(default_factory=dict)
    """What a rounding costs, by the key of the sequence on which it was measured."""
    kl: dict[str, list[Array]] = field(default_factory=lambda: defaultdict(list))
    """KL of each row, by scenario and role, for an engine whose logits are judged by medians."""
    suspects: list[tuple[Request, Compared]] = field(default_factory=list)
    """Compared sequences that are farther off than allowed, unless all are."""
    requests: int = 0
    forks: int = 0
    turns: int = 0
    """Later chunks of sequences that had decoded."""
    prefixes: int = 0
    """Prompts that began like one before, on an engine that keeps prefixes."""
    together: int = 0
    """Tokens that at least two sequences of the largest batch had."""
    tokens: int = 0
    decoded: int = 0
    batch: int = 0
    rows: int = 0
    steps: int = 0
    """Decode steps of the engine."""
    preempted: int = 0
    """How often requests gave way in a full pool."""
    idle: float = 0.0
    """Longest time in seconds that the engine was left alone while a sequence was live."""
    resting: StressSequence | None = None
    """A sequence that lives through all scenarios, and decodes a token after each."""
    prompts: int = 0
    """Rows of prompts and later chunks among them."""
    offsets: set[int] = field(default_factory=set)
    allocation: Allocation | None = None
    live: list[StressSequence] = field(default_factory=list)
    ended: list[StressSequence] = field(default_factory=list)
    """Sequences that left and were not compared yet."""
    answers: list[tuple[str, list[int], list[int]]] = field(default_factory=list)
    """Role, prompt and answer of `generate`, not checked yet."""

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.reference.run_as(self.engine)
        self.loses = loses_pages(self.engine)
        self.by_median = self.reference.measures or self.reference.compute_dtype is None

    # --- acts -------------------------------------------------------------------------------------------------------

    def draw(self, count: int) -> list[int]:
        tokens: list[int] = self.rng.integers(0, self.engine.vocab_size, count).tolist()
        return tokens

    def length(self, least: int, most: int) -> int:
        """Draw a length, both ends included."""
        return int(self.rng.integers(least, most + 1))

    def sequence(self, role: str, prompt: int | Sequence[int], steps: int = 0) -> StressSequence:
        """Return a sequence of a prompt, of so many random tokens or of these, that will be fed as many random ones."""
        tokens = self.draw(prompt) if isinstance(prompt, int) else list(prompt)
        return StressSequence(role, tokens, self.draw(steps))

    def prefill(self, *sequences: StressSequence) -> None:
        """Start sequences together."""
        handles, logits = self.engine.prefill([sequence.prompt for sequence in sequences])
        self.requests += len(sequences)
        for row, (sequence, handle) in enumerate(zip(sequences, handles, strict=True)):
            sequence.handle = handle
            self._take(sequence, sequence.prompt, logits[row], row, len(sequences), decoded=False)
        self.live += sequences
        self._observe(sequences if self.loses else ())

    def _take(
        self, sequence: StressSequence, tokens: Sequence[int], logits_V: Logits, row: int, batch: int, *, decoded: bool
    ) -> None:
        """Append tokens to a sequence, and the logits that the engine gave after them in a row of a batch."""
        sequence.tokens += tokens
        if decoded and sequence.pieces[-1][1]:
            sequence.pieces[-1] = (sequence.pieces[-1][0] + len(tokens), True)
        else:
            sequence.pieces.append((len(tokens), decoded))
        sequence.request.row(logits_V, len(sequence.tokens) - 1, (row, batch))
        if sequence.watched:
            self.tokens, self.rows = max(self.tokens, len(sequence.tokens)), self.rows + 1
            self.prompts += not decoded
            if decoded:
                self.decoded, self.batch = max(self.decoded, sequence.decoded), max(self.batch, batch)
                self.offsets.add((len(sequence.tokens) - 1) % PAGE_TOKENS)

    def decode(self, *sequences: StressSequence, steps: int = 1) -> None:
        """Decode the next token of each, so many times."""
        for _ in range(steps):
            tokens = [sequence.ahead.pop(0) if sequence.ahead else self.draw(1)[0] for sequence in sequences]
            logits = self.engine.decode([sequence.handle for sequence in sequences], tokens)
            self.steps += 1
            for row, (sequence, token) in enumerate(zip(sequences, tokens, strict=True)):
                self._take(sequence, [token], logits[row], row, len(sequences), decoded=True)
            self._observe([sequence for sequence in sequences if self.loses and (len(sequence.tokens) + 1) % PAGE_TOKENS == 0])
            if self.allocation is None:
                self.allocation = allocation(self.engine)

    def extend(self, sequence: StressSequence, count: int) -> None:
        """Append a later chunk of a prompt."""
        tokens = self.draw(count)
        self._observe([sequence] if self.loses else ())
        logits_V = self.engine.extend(sequence.handle, tokens)
        self.turns += sequence.decoded > 0
        self._take(sequence, tokens, logits_V, 0, 1, decoded=False)
        self._observe([sequence] if self.loses else ())

    def fork(self, sequence: StressSequence, role: str, steps: int = 0) -> StressSequence:
        """Start another sequence with the same tokens."""
        branch = replace(
            sequence,
            role=role,
            tokens=list(sequence.tokens),
            pieces=list(sequence.pieces),
            request=Request(""),
            ahead=self.draw(steps),
        )
        branch.request.observe(sequence.request.layers)
        branch.handle = self.engine.fork(sequence.handle)
        self.forks += 1
        self.requests += 1
        self.live.append(branch)
        return branch

    def ask(
        self, sequences: Sequence[StressSequence], limits: Sequence[int], stops: Sequence[int] = (), at_once: int | None = None
    ) -> list[list[int]]:
        """Let the engine answer prompts freely, and return the answers. Their tokens are checked when the scenario ends.

        Of several stop tokens the last one is expected.
        """
        at_once = at_once or self.largest
        answers = self.engine.generate([sequence.prompt for sequence in sequences], limits, stops, max_sequences=at_once)
        self.requests += len(sequences)
        for sequence, answer, limit in zip(sequences, answers, limits, strict=True):
            stopped = [] if len(answer) >= limit else list(stops[-1:])
            if (len(answer) + len(stopped) < limit and not stopped) or len(answer) > limit:
                self._fail_answer(sequence, f"{len(answer)} tokens instead of {limit}")
            if not set(answer).isdisjoint(stops):
                self._fail_answer(sequence, "the stop token, and more,")
            if answer or stopped:
                self.answers.append((sequence.role, sequence.prompt, [*answer, *stopped]))
        return [list(answer) for answer in answers]

    def _fail_answer(self, sequence: StressSequence, what: str) -> None:
        self.failures.append(f"generate: {what} to a prompt of {len(sequence.prompt)} tokens")

    def release(self, *sequences: StressSequence) -> None:
        self._observe(sequences)
        self.engine.release([sequence.handle for sequence in sequences])
        for sequence in sequences:
            sequence.handle = -1
            self.live.remove(sequence)
        self.ended += [sequence for sequence in sequences if sequence.watched]

    def _observe(self, sequences: Sequence[StressSequence]) -> None:
        """Look at what the engine stored of sequences that leave, or that may give pages back with their next token."""
        for sequence in sequences if self.engine.can(Engine.stored) else ():
            if sequence.watched:
                sequence.request.observe(self.engine.stored(sequence.handle))

    def serve(self, sequences: Sequence[StressSequence]) -> None:
        """Start sequences together and decode each to its end, when it leaves; the first one a step alone, a batch of one."""
        if self.engine.can(Engine.forced_together):
            self._in_requests(sequences)
            return
        self.prefill(*sequences)
        self.decode(sequences[0])
        self.finish(sequences)

    def finish(self, sequences: Sequence[StressSequence]) -> None:
        """Decode sequences together, each to its end, when it leaves."""
        going = list(sequences)
        while going:
            if len(going) == self.largest:
                self.together = max(self.together, sorted(len(sequence.tokens) + 1 for sequence in going)[-2:][0])
            self.decode(*going)
            if not any(sequence.ahead for sequence in going):
                self._weigh(going)
            self.release(*(sequence for sequence in going if not sequence.ahead))
            going = [sequence for sequence in going if sequence.ahead]

    def _weigh(self, live: Sequence[StressSequence]) -> None:
        """Note pages that the policy gave back, and that the only live sequences still hold."""
        policy, shape = self.engine.policy, self.engine.shape
        lengths = [len(sequence.tokens) for sequence in (*live, *([self.resting] if self.resting else ()))]
        due = sum(policy.kept_pages(length, shape) + policy.window_pages(length) for length in lengths)
        held = 0 if self.engine.keeps_prefixes else self.engine.memory().held_pages
        if held > due + len(live):  # a page may leave a step later
            self.failures.append(
                f"sequences of {', '.join(map(str, lengths))} tokens hold {held} pages, the policy claims {due}"
            )

    def _in_requests(self, sequences: Sequence[StressSequence]) -> None:
        """What `play` does on an engine of whole requests."""
        self.prefill(*sequences)
        self.engine.release([sequence.handle for sequence in sequences])
        answers = self.engine.forced_together(
            [([*sequence.prompt, *sequence.ahead], len(sequence.prompt)) for sequence in sequences]
        )
        for row, (sequence, logits) in enumerate(zip(sequences, answers, strict=True)):
            for token, logits_V in zip(sequence.ahead, logits, strict=True):
                self._take(sequence, [token], logits_V, row, len(sequences), decoded=True)
            if sequence.watched and self.engine.can(Engine.stored_request):
                sequence.request.observe(self.engine.stored_request(row))
            sequence.handle, sequence.ahead = -1, []
            self.live.remove(sequence)
        self.ended += [sequence for sequence in sequences if sequence.watched]
        if len(sequences) == self.largest:
            self.together = max(self.together, sorted(len(sequence.tokens) for sequence in sequences)[-2:][0])

    # --- the reference engine -----------------------------------------------------------------------------------------

    def end(self) -> None:
        """End a scenario: release the sequences that a refusal left, and compare while the engine is idle."""
        self.release(*[sequence for sequence in self.live if sequence.handle >= 0 and sequence is not self.resting])
        started = time.monotonic()
        self.compare()
        self.idle = max(self.idle, time.monotonic() - started)
        self._check_answers()

    def compare(self, least: int = 0) -> None:
        """Compare the sequences that have ended with the reference engine, once they have `least` tokens."""
        ended = [sequence for sequence in self.ended if sequence.request.logits]
        if sum(len(sequence.tokens) for sequence in ended) < least:
            return
        self.ended, by_codes = [], defaultdict[Any, list[StressSequence]](list)
        for sequence in ended:
            by_codes[sequence.key, sequence.request.digest].append(sequence)
        alike = {sequences[0]: sequences for sequences in by_codes.values()}
        fresh = list({sequence.key: sequence for sequence in alike if sequence.key not in self.roundings}.values())
        again = [sequence for sequence in alike if sequence not in fresh]
        for group in [*passes(fresh), *passes(again)]:
            policy, shape = self.engine.policy, self.engine.shape
            problems = [problem_of(sequence.request.layers, policy, shape, len(sequence.tokens)) for sequence in group]
            caches = [[] if wrong else sequence.request.layers for sequence, wrong in zip(group, problems, strict=True)]
            replays = self.reference.replay(
                [sequence.fed for sequence in group], caches, disturbed=group[0].key not in self.roundings
            )
            for first, replay, problem in zip(group, replays, problems, strict=True):
                for sequence in alike[first]:
                    self._note(sequence, replay, problem)

    def _note(self, sequence: StressSequence, replay: Replay, problem: str) -> None:
        request = sequence.request
        request.name = f"{self.scenario}: {sequence.role}"
        compared = request.compared(
            replay.tail(len(request.logits)), len(sequence.prompt), sequence.decoded, self.engine.policy, problem
        )
        if self.reference.measures and any(compared.errors):
            compared = compared.by_layer(self.layers)
        rounding = self.roundings.setdefault(sequence.key, compared.record.rounding)
        compared = replace(compared, record=compared.record.model_copy(update={"rounding": rounding}))
        self.records.append(compared.record)
        if self.by_median:
            self.kl[request.name].append(compared.kl)
        if self._times_allowed(compared) > 1:
            self.suspects.append((replace(request, logits=[], layers=[]), compared))

    def _times_allowed(self, compared: Compared, usual: Distances = (0.0, 0.0, 0.0)) -> float:
        """Return how many times as far off as allowed a sequence is, where these distances are `usual` in the run.

        The rule is conformance's, but a rounding costs at least the `usual`: few tokens may be lucky. Roundings say nothing if
        a float32 engine does not show its cache, where one number that rounds to another code outweighs them: such sequences
        are held to the median one. Logits that are judged by medians need only be finite here.
        """
        record, own, (kl, mean, largest) = compared.record, compared.record.rounding, usual
        if self.by_median and record.engine.kl_max is not None:
            finite_logits = record.engine.model_copy(update={"kl_mean": 0.0, "kl_max": 0.0})
            return record.model_copy(update={"engine": finite_logits}).times_allowed(self.limit)
        if not (record.problem or self.by_median or any(compared.errors)):
            return or_infinite(record.engine.kl_mean) / max(UNUSUAL_KL, UNUSUAL * kl)
        widened = {"kl_mean": max(or_infinite(own.kl_mean), mean), "kl_max": max(or_infinite(own.kl_max), largest)}
        return record.model_copy(update={"rounding": own.model_copy(update=widened)}).times_allowed(self.limit)

    def deviations(self) -> Iterator[str]:
        """Yield the sequences that deviate, the worst first: one of each name."""
        # A rounding costs much in a few sequences: attention hangs on one number, or an exact token, not shown, rounds.
        known = [(one.kl_mean or 0.0, one.kl_max or 0.0) for one in self.roundings.values()] or [(0.0, 0.0)]
        mean, largest = WORST_SHARE * np.max(known, axis=0)
        kl = np.median([or_infinite(record.engine.kl_mean) for record in self.records] or [0.0])
        usual = float(kl), float(mean), float(largest)
        suspects = ((self._times_allowed(compared, usual), request, compared) for request, compared in self.suspects)
        ranked = sorted(suspects, key=lambda suspect: -suspect[0])
        names = Counter(request.name for times, request, _ in ranked if times > 1)
        for name, count in names.items():
            times, request, compared = next(suspect for suspect in ranked if suspect[1].name == name)
            kl_max, problem = compared.record.engine.kl_max, compared.record.problem
            off = "logits are not finite" if kl_max is None else f"KL up to {kl_max:.1e} from the oracle"
            more = f"; and {count - 1} more such" if count > 1 else ""
            place = problem or first_deviation(request, compared, self.limit).told()
            yield f"{name}: {place}, {off}, {times:.2g} times as far as allowed{more}"
        if self.kl and self.reference.compute_dtype is None:
            usual_row = float(np.median(np.concatenate(list(chain(*self.kl.values())))))
            yield from far_medians(self.kl, max(UNUSUAL_KL, UNUSUAL * usual_row))
        elif self.kl:
            yield from far_medians(self.kl, self.limit**2 * float(np.median(known, axis=0)[0]))

    def _check_answers(self) -> None:
        """Check that every token of `generate` is the likeliest but for rounding, over the reference engine's own codes.

        One number that rounds to another code may change an answer: what looks wrong is forced on the engine, too.
        """
        answers, self.answers = self.answers, []
        if self.reference.compute_dtype is None:
            return
        feds = [Fed(prompt + said[:-1], [(len(prompt), False), (len(said) - 1, True)]) for _, prompt, said in answers]
        replays = [one for group in passes(feds) for one in self.reference.replay(group)]
        rounding = max((float(np.abs(one.disturbed - one.logits).max()) for one in replays), default=0.0)
        for (role, prompt, said), replay in zip(answers, replays, strict=True):
            if (behind(replay.logits, said) <= 4 * rounding + 1e-3).all():
                continue
            found = contradiction(self.engine, self._forced(role, prompt, said), said)
            if found is not None:
                what = "the first token" if found[0] == 0 else f"token {found[0]}"
                self.failures.append(
                    f"generate: {what} of the answer to a prompt of {len(prompt)} tokens ({role}) lies {found[1]:.2g} (logits) "
                    "behind what the prompt and the answer before it make most likely"
                )
        self.compare()

    def _forced(self, role: str, prompt: list[int], said: list[int]) -> Logits:
        """Return what the engine itself finds likely at each token of an answer; the sequence is compared as others are."""
        sequence = StressSequence(f"{role}, forced", prompt, said[:-1])
        if self.engine.can(Engine.forced_together) and sequence.ahead:
            self.serve([sequence])
        else:
            self.prefill(sequence)
            self.decode(sequence, steps=len(sequence.ahead))
            self.release(sequence)
        return np.stack(sequence.request.logits)
