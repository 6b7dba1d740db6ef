"""The operations of the stress test, and the comparison of its sequences with the reference engine.

The engine runs first. The stored codes of a sequence are recorded before the engine frees them. At the end of a scenario, the
reference engine replays its sequences together over these codes.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np

from stages.engines.base import Logits
from stages.engines.interface import Engine
from stages.engines.reference.attention import Fed
from stages.engines.reference.replay import Replay
from stages.evaluate.conformance.deviation import first_deviation
from stages.evaluate.conformance.engine import ReferenceEngine
from stages.evaluate.conformance.request import Compared, Request, far_medians, loses_pages, passes, problem_of
from stages.evaluate.conformance.sequence import StressSequence
from stages.evaluate.decoding.free import behind, contradiction
from stages.evaluate.decoding.system import allocation
from stages.evaluate.distances.distance import Array
from stages.policies.policy import PAGE_TOKENS
from stages.verdict.conformance import ComparedRequest, Distance
from stages.verdict.coverage import Allocation
from stages.verdict.record import or_infinite
from stages.workloads.config import ProbeConfig

WORST_SHARE = 1 / 8
"""Lower limit of a rounding's KL, as a fraction of the rounding's KL in the run's worst sequence.
It is needed because sound engines have shown 65 times the KL of a rounding."""
UNUSUAL = 30.0
"""Maximum mean KL of a sequence as a multiple of the median sequence's mean KL, if no rounding is known."""
UNUSUAL_KL = 0.02
"""Mean KL in nats that is always allowed if no rounding is known."""

Distances = tuple[float, float, float]
"""(mean KL of an engine, mean KL of a rounding, largest KL of a rounding)."""


@dataclass
class StressTest:
    """State of a run over all scenarios."""

    engine: Engine
    reference: ReferenceEngine
    config: ProbeConfig
    max_tokens: int
    largest: int
    """Number of sequences in the largest batch."""
    claimed: int
    """Number of tokens in the longest sample."""
    limit: float
    """Maximum distance of a sequence in roundings, as for a request of the forced decode."""
    layers: tuple[float, ...] = ()
    """Errors of the 16-bit engine's stored vectors by layer, if a rounding is measured."""
    seed: int = 0
    scenario: str = ""
    """Name of the running scenario."""
    failures: list[str] = field(default_factory=list)
    """Messages about contradictions, refused scenarios, and influence between requests."""
    records: list[ComparedRequest] = field(default_factory=list)
    roundings: dict[Any, Distance] = field(default_factory=dict)
    """Distances caused by a rounding, by sequence key."""
    kl: dict[str, list[Array]] = field(default_factory=lambda: defaultdict(list))
    """KL by row, by scenario and role. Used only if medians of logits are judged."""
    suspects: list[tuple[Request, Compared]] = field(default_factory=list)
    """Compared sequences above their limit. The final limit may be higher, see `deviations`."""
    requests: int = 0
    forks: int = 0
    turns: int = 0
    """Number of later chunks, for sequences that had decoded before."""
    prefixes: int = 0
    """Number of prompts that begin like an earlier prompt, on an engine that keeps prefixes."""
    together: int = 0
    """Length in tokens of the second longest sequence in a batch of the largest size."""
    tokens: int = 0
    decoded: int = 0
    batch: int = 0
    rows: int = 0
    steps: int = 0
    """Number of decode steps."""
    preempted: int = 0
    """Number of preemptions in a full pool."""
    idle: float = 0.0
    """Longest idle time of the engine with a live sequence, in seconds."""
    resting: StressSequence | None = None
    """The sequence that stays live during all scenarios and decodes a token per scenario."""
    prompts: int = 0
    """Number of rows that belong to prompts and later chunks."""
    offsets: set[int] = field(default_factory=set)
    prompt_offsets: set[int] = field(default_factory=set)
    """Lengths of prompts modulo the page size."""
    allocation: Allocation | None = None
    live: list[StressSequence] = field(default_factory=list)
    ended: list[StressSequence] = field(default_factory=list)
    """Released sequences that are not compared yet."""
    answers: list[tuple[str, list[int], list[int]]] = field(default_factory=list)
    """(role, prompt, answer) from `generate` that are not checked yet."""

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.reference.run_as(self.engine)
        self.loses = loses_pages(self.engine)
        self.by_median = self.reference.measures or self.reference.compute_dtype is None

    # --- operations -------------------------------------------------------------------------------------------------

    def draw(self, count: int) -> list[int]:
        tokens: list[int] = self.rng.integers(0, self.engine.vocab_size, count).tolist()
        return tokens

    def length(self, least: int, most: int) -> int:
        """Draw a length from `least` to `most`, inclusive."""
        return int(self.rng.integers(least, most + 1))

    def sequence(self, role: str, prompt: int | Sequence[int], steps: int = 0) -> StressSequence:
        """Return a sequence. `prompt`: tokens, or a number of random tokens. `steps`: number of random tokens to decode."""
        tokens = self.draw(prompt) if isinstance(prompt, int) else list(prompt)
        return StressSequence(role, tokens, self.draw(steps))

    def prefill(self, *sequences: StressSequence) -> None:
        """Prefill sequences together."""
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
        """Record fed tokens and the logits of the last token, computed in row `row` of a batch of size `batch`."""
        sequence.tokens += tokens
        if decoded and sequence.pieces[-1][1]:
            sequence.pieces[-1] = (sequence.pieces[-1][0] + len(tokens), True)
        else:
            sequence.pieces.append((len(tokens), decoded))
        sequence.request.row(logits_V, len(sequence.tokens) - 1, (row, batch))
        if sequence.watched:
            self.tokens, self.rows = max(self.tokens, len(sequence.tokens)), self.rows + 1
            self.prompts += not decoded
            if tokens is sequence.prompt:
                self.prompt_offsets.add(len(tokens) % PAGE_TOKENS)
            if decoded:
                self.decoded, self.batch = max(self.decoded, sequence.decoded), max(self.batch, batch)
                self.offsets.add((len(sequence.tokens) - 1) % PAGE_TOKENS)

    def decode(self, *sequences: StressSequence, steps: int = 1) -> None:
        """Decode `steps` tokens of all sequences together."""
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
        """Append a chunk of `count` random tokens."""
        tokens = self.draw(count)
        self._observe([sequence] if self.loses else ())
        logits_V = self.engine.extend(sequence.handle, tokens)
        self.turns += sequence.decoded > 0
        self._take(sequence, tokens, logits_V, 0, 1, decoded=False)
        self._observe([sequence] if self.loses else ())

    def fork(self, sequence: StressSequence, role: str, steps: int = 0) -> StressSequence:
        """Fork a sequence."""
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
        """Generate and return free answers. Their tokens are checked at the end of the scenario.

        If there are several stop tokens, answers are expected to end with the last stop token.
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
        """Record the stored codes of sequences. Call it before a release, and before a token that may free pages."""
        for sequence in sequences if self.engine.can(Engine.stored) else ():
            if sequence.watched:
                sequence.request.observe(self.engine.stored(sequence.handle))

    def serve(self, sequences: Sequence[StressSequence]) -> None:
        """Prefill sequences together and decode them to their ends. The first sequence decodes a step in a batch of one."""
        if self.engine.can(Engine.forced_together):
            self._in_requests(sequences)
            return
        self.prefill(*sequences)
        self.decode(sequences[0])
        self.finish(sequences)

    def finish(self, sequences: Sequence[StressSequence]) -> None:
        """Decode sequences together. A sequence leaves the batch when it ends."""
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
        """Report pages that the live sequences still hold although the policy frees them. No other sequences may be live."""
        policy, shape = self.engine.policy, self.engine.shape
        lengths = [len(sequence.tokens) for sequence in (*live, *([self.resting] if self.resting else ()))]
        due = sum(policy.kept_pages(length, shape) + policy.window_pages(length) for length in lengths)
        held = 0 if self.engine.keeps_prefixes else self.engine.memory().held_pages
        if held > due + len(live):  # a page may be freed a step later
            self.failures.append(
                f"sequences of {', '.join(map(str, lengths))} tokens hold {held} pages, the policy claims {due}"
            )

    def _in_requests(self, sequences: Sequence[StressSequence]) -> None:
        """Implement `serve` for an engine that serves whole requests."""
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
        """End a scenario: release sequences left by a refusal, then compare while the engine is idle."""
        self.release(*[sequence for sequence in self.live if sequence.handle >= 0 and sequence is not self.resting])
        started = time.monotonic()
        self.compare()
        self.idle = max(self.idle, time.monotonic() - started)
        self._check_answers()

    def compare(self, least: int = 0) -> None:
        """Compare ended sequences with the reference engine, if they have at least `least` tokens in total."""
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
        """Return the worst figure of a sequence as a multiple of its allowed maximum.

        The rule is the rule of conformance, with the distances of a rounding raised to at least `usual`, because short
        sequences may show too small a rounding by chance. If a float32 engine does not show its cache, a single flipped code
        outweighs all roundings, so its sequences are compared with the median sequence. Logits that are judged by medians are
        only required to be finite here.
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
        """Yield messages about deviating sequences, worst first and only the worst sequence per name."""
        # A few sequences are sensitive to rounding: attention depends on a single number, or hidden exact tokens are rounded.
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
            off = "logits are not finite" if kl_max is None else f"KL up to {kl_max:.1e} from the reference engine"
            more = f"; and {count - 1} more such" if count > 1 else ""
            place = problem or first_deviation(request, compared, self.limit).told()
            yield f"{name}: {place}, {off}, {times:.2g} times as far as allowed{more}"
        if self.kl and self.reference.compute_dtype is None:
            usual_row = float(np.median(np.concatenate(list(chain(*self.kl.values())))))
            yield from far_medians(self.kl, max(UNUSUAL_KL, UNUSUAL * usual_row))
        elif self.kl:
            yield from far_medians(self.kl, self.limit**2 * float(np.median(known, axis=0)[0]))

    def _check_answers(self) -> None:
        """Check up to rounding that all tokens of `generate` are the most likely, over the reference engine's own codes.

        A single flipped code may change an answer. Answers that look wrong are therefore forced on the engine, too.
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
        """Return the engine's logits of a forced answer. The sequence is compared with the reference engine, too."""
        sequence = StressSequence(f"{role}, forced", prompt, said[:-1])
        if self.engine.can(Engine.forced_together) and sequence.ahead:
            self.serve([sequence])
        else:
            self.prefill(sequence)
            self.decode(sequence, steps=len(sequence.ahead))
            self.release(sequence)
        return np.stack(sequence.request.logits)
