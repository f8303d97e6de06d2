"""The simulated engine's scheduler: continuous batching as in vLLM, in virtual time. The scheduler does no I/O and only
counts tokens.

A step decodes one token of every running sequence and takes `base_s(sequences) + gamma_s*kv_tokens +
prefill_s_per_token*prefilled_tokens`, where base_s is a curve or `alpha_s + beta_s*sequences` and kv_tokens are the
tokens resident before the step. KV beyond `kv_capacity_tokens` is spilled to CPU memory, which adds `spill_s_per_token`
per token and step. Sequences are admitted in the order of arrival, while the batch has space and KV blocks for the
sequence's context are free. A running sequence without a free block preempts the sequence admitted last, which returns
to the head of the queue and is prefilled again. With prefix caching, all samples of a prompt share its full blocks,
from the admission of the first sample until the last sample ends. In contrast, vLLM keeps the blocks until it needs
them for other requests, and therefore reuses more of them. Between admissions, preemptions and ends of sequences, each
step only adds one token per sequence, so these steps are computed together. The run time of a simulation therefore
depends on the number of these events, not on the number of tokens.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from planner.model import RequestId

if TYPE_CHECKING:  # it imports numpy, which engine processes do not need
    from planner.cost.profile import Curve


@dataclass(frozen=True, slots=True)
class EngineShape:
    """The constants of one engine. Times are in virtual seconds. If the curve `base_s` is given, it replaces `alpha_s`
    and `beta_s`."""

    alpha_s: float
    beta_s: float
    gamma_s: float
    max_num_seqs: int
    kv_capacity_tokens: int
    prefill_s_per_token: float = 0.0
    block_tokens: int = 16
    base_s: "Curve | None" = None
    spill_capacity_tokens: int = 0  # additional KV in CPU memory
    spill_s_per_token: float = 0.0
    prefix_caching: bool = False

    @property
    def blocks(self) -> int:
        return (self.kv_capacity_tokens + self.spill_capacity_tokens) // self.block_tokens

    def steps_s(self, steps: int, sequences: int, kv_tokens: int) -> float:
        """Return the duration in seconds of `steps` decode steps of a batch of `sequences` sequences. `kv_tokens` is
        the number of resident tokens before the first step. Each step adds one token per sequence."""
        base_s = self.base_s.at(sequences) if self.base_s else self.alpha_s + self.beta_s * sequences
        seconds = base_s * steps + self.gamma_s * (kv_tokens * steps + sequences * (steps * (steps - 1) // 2))
        if self.spill_s_per_token:
            seconds += self.spill_s_per_token * self._spilled_token_steps(steps, sequences, kv_tokens)
        return seconds

    def _spilled_token_steps(self, steps: int, sequences: int, kv_tokens: int) -> int:
        """Return the number of tokens spilled to CPU memory, summed over the steps."""
        over_tokens = kv_tokens - self.kv_capacity_tokens
        within = 0 if over_tokens >= 0 else min(steps, -(over_tokens // sequences))  # steps without spilled tokens
        left = steps - within
        return left * (over_tokens + within * sequences) + sequences * (left * (left - 1) // 2)


@dataclass(slots=True)
class Sequence:
    """One request on one engine. Each step increases `context_tokens` by 1 and decreases `to_generate` by 1."""

    id: RequestId
    context_tokens: int
    to_generate: int
    generated: int = 0
    blocks: int = 0
    prefilled: bool = False  # its KV was transferred: its first admission needs no prefill
    group: str = ""  # the group of samples of one prompt; empty: none
    prompt_tokens: int = 0  # prompt tokens shared by the group
    holds_prefix: bool = False


@dataclass(frozen=True, slots=True)
class SequenceProgress:
    """The tokens that one sequence gained in one call of `advance`."""

    id: RequestId
    tokens: int
    finished_s: float | None = None  # time of its last token


@dataclass(slots=True)
class Scheduler:
    """The queue, batch and KV blocks of one engine. `now_s` is the end of the last completed step."""

    shape: EngineShape
    now_s: float = 0.0
    waiting: deque[Sequence] = field(default_factory=deque)
    running: list[Sequence] = field(default_factory=list)  # in order of admission
    preemptions_total: int = 0
    generated_tokens_total: int = 0
    prefilled_tokens_total: int = 0
    busy_s: float = 0.0
    paused: bool = False
    slowdown: float = 1.0  # factor on step times, from other traffic on the engine's links
    _free_blocks: int = field(init=False)
    _step_s: float | None = None  # duration of the current step, None between steps
    _prefix_holders: dict[str, int] = field(default_factory=dict)  # group -> sequences that use its cached prefix

    def __post_init__(self) -> None:
        self._free_blocks = self.shape.blocks

    @property
    def idle(self) -> bool:
        return not self.running and not self.waiting

    @property
    def kv_used_tokens(self) -> int:
        return (self.shape.blocks - self._free_blocks) * self.shape.block_tokens

    def submit(
        self,
        at_s: float,
        request_id: RequestId,
        context_tokens: int,
        to_generate: int,
        prefilled: bool = False,
        *,
        group: str = "",
        prompt_tokens: int = 0,
    ) -> None:
        """Queue a request that generates `to_generate` more tokens. If the engine is idle, its time advances to `at_s`.
        If `prefilled` is true, the KV of the context is already on the engine. The first `prompt_tokens` tokens of the
        request are shared with the other samples in `group`. Raises ValueError if `context_tokens` or `to_generate` is
        less than 1, or if the request can never fit into the KV cache."""
        if to_generate < 1 or context_tokens < 1:
            raise ValueError(f"context_tokens and to_generate must be >= 1, got {context_tokens}, {to_generate}")
        if self._blocks_of(context_tokens + to_generate) > self.shape.blocks:
            tokens = context_tokens + to_generate
            raise ValueError(f"tokens must fit KV of {self.shape.kv_capacity_tokens}, got {tokens}")
        if self.idle:
            self.now_s = max(self.now_s, at_s)
        sequence = Sequence(request_id, context_tokens, to_generate, prefilled=prefilled)
        if self.shape.prefix_caching:
            sequence.group, sequence.prompt_tokens = group, prompt_tokens
        self.waiting.append(sequence)

    def abort(self, request_ids: Iterable[RequestId]) -> list[Sequence]:
        """Drop these requests and free their blocks. Return the sequences that were dropped."""
        gone = set(request_ids)
        dropped = [s for s in (*self.running, *self.waiting) if s.id in gone]
        for sequence in dropped:
            self._release(sequence)
        self.running = [s for s in self.running if s.id not in gone]
        self.waiting = deque(s for s in self.waiting if s.id not in gone)
        return dropped

    def pause(self) -> None:
        """Stop stepping and admission. Every sequence keeps its position and its KV."""
        self.paused = True

    def resume(self, at_s: float) -> None:
        self.paused = False
        self.now_s = max(self.now_s, at_s)

    def reshape(self, shape: EngineShape) -> None:
        """Change the batch size, the KV capacity and the step times. Raises ValueError if the running sequences do not
        fit, or if the block size would change."""
        free_blocks = self._free_blocks + shape.blocks - self.shape.blocks
        if free_blocks < 0 or len(self.running) > shape.max_num_seqs or shape.block_tokens != self.shape.block_tokens:
            raise ValueError(f"shape must fit the {len(self.running)} running sequences, got {shape}")
        self.shape, self._free_blocks, self._step_s = shape, free_blocks, None

    def advance(self, until_s: float) -> list[SequenceProgress]:
        """Complete every step that ends by `until_s`. Return the tokens that each sequence gained, in the order of
        admission."""
        made: dict[RequestId, int] = {}
        finished_s: dict[RequestId, float] = {}
        while not self.paused and not self.idle:
            prefill_tokens = 0
            if self._step_s is None:
                prefill_tokens = self._schedule()
            steps, elapsed_s = self._plan_steps(until_s, prefill_tokens)
            if steps == 0:
                self._step_s = elapsed_s
                break
            self._step_s = None
            self._apply(steps, elapsed_s, made, finished_s)
        if self.idle:
            self.now_s = max(self.now_s, until_s)
        if self.idle or self.paused:
            self._step_s = None
        return [SequenceProgress(request_id, tokens, finished_s.get(request_id)) for request_id, tokens in made.items()]

    def _blocks_of(self, tokens: int) -> int:
        return -(-tokens // self.shape.block_tokens)

    def _release(self, sequence: Sequence) -> None:
        self._free_blocks += sequence.blocks
        sequence.blocks = 0
        if sequence.holds_prefix:
            sequence.holds_prefix = False
            self._prefix_holders[sequence.group] -= 1
            if self._prefix_holders[sequence.group]:
                self._free_blocks -= self._prefix_blocks(sequence)
            else:
                del self._prefix_holders[sequence.group]

    def cached_tokens(self, group: str, prompt_tokens: int) -> int:
        """Return the number of tokens of a prompt whose KV is cached because other samples of its group are running."""
        return prompt_tokens // self.shape.block_tokens * self.shape.block_tokens if self._holds(group) else 0

    def _holds(self, group: str) -> bool:
        return bool(group) and group in self._prefix_holders

    def _prefix_blocks(self, sequence: Sequence) -> int:
        return sequence.prompt_tokens // self.shape.block_tokens

    def _cached_blocks(self, sequence: Sequence) -> int:
        """Return the number of cached blocks of the prompt of a sequence that is not running."""
        return self._prefix_blocks(sequence) if self._holds(sequence.group) else 0

    def _needed_blocks(self, sequence: Sequence) -> int:
        """Return the number of free blocks required to admit a sequence."""
        return self._blocks_of(sequence.context_tokens + 1) - self._cached_blocks(sequence)

    def _schedule(self) -> int:
        """Reserve a block for each running sequence's next token, and preempt sequences if there are too few free
        blocks. Then admit sequences from the queue. Return the number of tokens to prefill."""
        preempted = False
        index = 0
        while index < len(self.running):
            sequence = self.running[index]
            missing = self._blocks_of(sequence.context_tokens + 1) - sequence.blocks
            while missing > self._free_blocks:
                victim = self.running.pop()
                self._release(victim)
                self.waiting.appendleft(victim)
                self.preemptions_total += 1
                preempted = True
                if victim is sequence:
                    break
            else:
                self._free_blocks -= missing
                sequence.blocks += missing
                index += 1
        return 0 if preempted and self.running else self._admit()

    def _admit(self) -> int:
        prefill_tokens = 0
        while self.waiting and len(self.running) < self.shape.max_num_seqs:
            needed = self._needed_blocks(self.waiting[0])
            if needed > self._free_blocks:
                break
            sequence = self.waiting.popleft()
            self._free_blocks -= needed
            cached = self._cached_blocks(sequence)
            sequence.blocks = needed + cached
            if not sequence.prefilled:
                prefill_tokens += sequence.context_tokens - cached * self.shape.block_tokens
            sequence.prefilled = False  # once preempted, it is prefilled again
            if sequence.group:
                sequence.holds_prefix = True
                self._prefix_holders[sequence.group] = self._prefix_holders.get(sequence.group, 0) + 1
            self.running.append(sequence)
        self.prefilled_tokens_total += prefill_tokens
        return prefill_tokens

    def _plan_steps(self, until_s: float, prefill_tokens: int) -> tuple[int, float]:
        """Return the number of steps that can be computed together and end by `until_s`, and their total duration in
        seconds. If this number is 0, the second value is the duration of the step in progress."""
        if self._step_s is not None:
            return (1, self._step_s) if self.now_s + self._step_s <= until_s else (0, self._step_s)
        most = 1 if prefill_tokens else min(self._steps_in_blocks(), min([s.to_generate for s in self.running]))
        if self._can_admit_later():
            most = 1
        kv_tokens = sum([s.context_tokens for s in self.running])
        prefill_s = self.shape.prefill_s_per_token * prefill_tokens
        batch, slowdown = len(self.running), self.slowdown
        elapsed_s = slowdown * self.shape.steps_s(most, batch, kv_tokens) + prefill_s
        if self.now_s + elapsed_s <= until_s:
            return most, elapsed_s
        low, low_s, high = 0, 0.0, most  # `low` steps end in time, `high` do not
        while high - low > 1:
            middle = (low + high) // 2
            middle_s = slowdown * self.shape.steps_s(middle, batch, kv_tokens) + prefill_s
            if self.now_s + middle_s <= until_s:
                low, low_s = middle, middle_s
            else:
                high = middle
        return (low, low_s) if low else (0, slowdown * self.shape.steps_s(1, batch, kv_tokens) + prefill_s)

    def _can_admit_later(self) -> bool:
        """Return whether the request at the head of the queue fits now, although it was not admitted at this step. This
        is the case, for example, if a preemption has freed blocks since."""
        if not self.waiting or len(self.running) >= self.shape.max_num_seqs:
            return False
        return self._needed_blocks(self.waiting[0]) <= self._free_blocks

    def _steps_in_blocks(self) -> int:
        """Return the number of steps until a sequence needs a block that is not free. The blocks of the first step are
        already reserved."""
        size = self.shape.block_tokens
        rounds = self._free_blocks // len(self.running)  # `size` further steps take one block per sequence
        free = self._free_blocks - rounds * len(self.running)
        crossing = [0] * size  # crossing[k]: sequences that need a block at the k-th further step, k = 1..size
        for sequence in self.running:
            crossing[(sequence.blocks * size - sequence.context_tokens) % size] += 1
        for step in range(1, size + 1):
            free -= crossing[step % size]
            if free < 0:
                return rounds * size + step
        return rounds * size + size

    def _apply(
        self, steps: int, elapsed_s: float, made: dict[RequestId, int], finished_s: dict[RequestId, float]
    ) -> None:
        self.now_s += elapsed_s
        self.busy_s += elapsed_s
        self.generated_tokens_total += steps * len(self.running)
        done = False
        for sequence in self.running:
            sequence.context_tokens += steps
            sequence.generated += steps
            sequence.to_generate -= steps
            needed = self._blocks_of(sequence.context_tokens)
            if needed > sequence.blocks:
                self._free_blocks -= needed - sequence.blocks
                sequence.blocks = needed
            made[sequence.id] = made.get(sequence.id, 0) + steps
            done = done or sequence.to_generate == 0
        if self._free_blocks < 0:
            raise AssertionError(f"took {-self._free_blocks} blocks that were not free")
        if done:
            for sequence in self.running:
                if sequence.to_generate == 0:
                    finished_s[sequence.id] = self.now_s
                    self._release(sequence)
            self.running = [s for s in self.running if s.to_generate > 0]


def decode_alone_s(shape: EngineShape, context_tokens: int, to_generate: int) -> float:
    """Return the time, in virtual seconds, that one request takes on an idle engine, including prefill. This is a lower
    bound on the request's time in any schedule."""
    return shape.steps_s(to_generate, 1, context_tokens) + shape.prefill_s_per_token * context_tokens
