"""Run the simulated engine's scheduler against a clock, and add tokens to each response as they are generated."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from orchestrrl.core.clock import Clock
from orchestrrl.core.operations import PauseMode
from orchestrrl.integrations.instrument.kv_scheduler import TransferParams
from orchestrrl.lab.simulated_engine.endings import AnswerEnd, AnswerPart, ending_of
from orchestrrl.lab.simulated_engine.options import SimulatedOptions, save_kv, take_kv
from orchestrrl.lab.simulated_engine.sampling import SimulatedRequest
from orchestrrl.lab.simulated_engine.scheduler import EngineShape, Scheduler, SequenceProgress
from orchestrrl.lab.simulated_engine.tokens import EOS, Generation, TokenModel
from planner.model import RequestId

UNNAMED = "default"  # vLLM's name of weights without a version


@dataclass(slots=True, eq=False)
class SimulatedAnswer:
    """The response to one request in progress. `parts` yields its tokens. Tokens generated between two reads form one
    part."""

    id: RequestId  # unique in the scheduler
    engine_id: str  # the id that clients send to /abort_requests; not unique
    request: SimulatedRequest
    generation: Generation
    ending: AnswerEnd
    made: int = 0
    loaded_tokens: int = 0  # tokens whose KV came from another engine and needs no prefill
    made_ids: list[int] = field(default_factory=list)  # generated tokens, only if the KV may be saved
    _weight_versions: list[tuple[str, int]] = field(default_factory=list)  # see AnswerPart
    _token_ids: list[int] = field(default_factory=list)
    _logprobs: list[float] = field(default_factory=list)
    _finish_reason: str | None = None
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def finished(self) -> bool:
        return self._finish_reason is not None

    def make(self, tokens: int, weight_version: str) -> None:
        """Generate the next `tokens` tokens. If they include the last token of the response, finish the response."""
        if not self._weight_versions or self._weight_versions[-1][0] != weight_version:
            self._weight_versions.append((weight_version, self.made))
        next_token = self.generation.next_token
        for _ in range(tokens):
            token, logprob = next_token()
            self._token_ids.append(token)
            self._logprobs.append(logprob)
        if self.request.handover is not None and self.request.handover.save is not None:
            self.made_ids += self._token_ids[-tokens:]
        self.made += tokens
        if self.made == self.ending.tokens:
            if self.ending.eos:
                self._token_ids[-1] = EOS
            self.finish(self.ending.finish_reason)
        self._news.set()

    def finish(self, reason: str) -> None:
        self._finish_reason = reason
        self._news.set()

    async def parts(self, *, streamed: bool = True) -> AsyncIterator[AnswerPart]:
        """Yield tokens as they are generated. If `streamed` is false, yield all tokens in one part at the end."""
        while True:
            await self._news.wait()
            self._news.clear()
            if not streamed and not self.finished:
                continue
            part = self._last_part() if self.finished else AnswerPart(self._token_ids, self._logprobs)
            self._token_ids, self._logprobs = [], []
            yield part
            if part.finish_reason is not None:
                return

    def _last_part(self) -> AnswerPart:
        stop_reason = self.ending.stop_reason if self._finish_reason == "stop" else None
        versions = tuple(self._weight_versions)
        return AnswerPart(self._token_ids, self._logprobs, self._finish_reason, stop_reason, versions)


class Runtime:
    """The runtime of one simulated engine. Virtual time runs `speed` times as fast as the clock. The scheduler is
    advanced every `tick_s` seconds of the clock. If a tick is late, the next parts contain more tokens."""

    def __init__(self, options: SimulatedOptions, model: TokenModel, clock: Clock) -> None:
        self.scheduler = Scheduler(options.shape)
        self.pause_mode: PauseMode | None = None
        self.prompt_tokens_total = 0
        self.loaded_tokens_total = 0  # prompt tokens whose KV was loaded
        self.finished_total = dict.fromkeys(("stop", "length", "abort"), 0)
        self.model = model
        self.weight_version = UNNAMED
        self._options = options
        self._clock = clock
        self.began_s = clock.now_s()
        self._answers: dict[RequestId, SimulatedAnswer] = {}
        self._loading: dict[RequestId, asyncio.Task[None]] = {}
        self._held: list[SimulatedAnswer] = []  # responses that wait for the end of a pause
        self._numbers = itertools.count()
        self._work = asyncio.Event()
        self._drained = asyncio.Event()

    @property
    def running(self) -> int:
        return len(self.scheduler.running)

    @property
    def waiting(self) -> int:
        return len(self.scheduler.waiting) + len(self._held) + len(self._loading)

    @property
    def kv_usage_fraction(self) -> float:
        shape = self.scheduler.shape
        return self.scheduler.kv_used_tokens / (shape.blocks * shape.block_tokens)

    def submit(self, request: SimulatedRequest, engine_id: str) -> SimulatedAnswer:
        """Accept a request and return its response, whose tokens are generated later. `engine_id` is the id by which
        clients can abort the request. The request is queued once its KV has been loaded and no pause holds it back."""
        generation = self.model.begin(request.prompt_ids, request.sampling)
        request_id = RequestId(f"{engine_id}#{next(self._numbers)}")
        answer = SimulatedAnswer(request_id, engine_id, request, generation, ending_of(request, generation))
        self._answers[request_id] = answer
        directory, wish = self._options.kv_directory, request.handover
        if directory is not None and wish is not None and wish.load is not None:
            self._loading[request_id] = asyncio.create_task(self._load(directory, answer, wish))
        else:
            self._begin(answer)
        return answer

    def _begin(self, answer: SimulatedAnswer) -> None:
        if self.pause_mode in (PauseMode.WAIT, PauseMode.ABORT):
            self._held.append(answer)
        else:
            self._enqueue(answer)

    async def _load(self, directory: Path, answer: SimulatedAnswer, wish: TransferParams) -> None:
        """Wait for the KV entry and its transfer, then start the request. If the entry does not arrive in time, all
        tokens are prefilled."""
        asked_s, found = self._clock.now_s(), take_kv(directory, wish, answer.request.prompt_ids)
        while found is None and self._clock.now_s() - asked_s < wish.wait_s:
            await self._clock.sleep(self._options.tick_s)
            found = take_kv(directory, wish, answer.request.prompt_ids)
        if found:
            await self._clock.sleep(self._options.transfer_s(found) / self._options.speed)
            answer.loaded_tokens = found
        del self._loading[answer.id]
        self._begin(answer)

    def abort(self, engine_ids: Iterable[str] = ()) -> int:
        """Finish the requests with these ids, or all requests if no id is given, with the tokens generated so far.
        Return the number of finished requests."""
        names = set(engine_ids)
        answers = [answer for answer in self._answers.values() if not names or answer.engine_id in names]
        self._abort(answers)
        return len(answers)

    def drop(self, answer: SimulatedAnswer) -> None:
        """Abort a response, for example because its client has disconnected. A finished response is not affected."""
        self._abort([answer] if answer.id in self._answers else [])

    async def pause(self, mode: PauseMode, clear_cache: bool = True) -> None:
        """Pause as vLLM does. In mode `KEEP`, the scheduler stops stepping. With `clear_cache`, running requests also
        lose their KV and are prefilled again. In mode `WAIT`, the call returns when all running requests have finished,
        and waiting requests are held. In mode `ABORT`, all requests end. Requests that arrive during a pause wait until
        `resume`."""
        self._advance()
        self.pause_mode = mode
        if mode is PauseMode.KEEP:
            self.scheduler.pause()
            if clear_cache:
                self._preempt_running()
            return
        self.scheduler.resume(self._virtual_s())
        if mode is PauseMode.ABORT:
            self.abort()
            return
        waiting = self.scheduler.abort([sequence.id for sequence in self.scheduler.waiting])
        self._held[:0] = [self._answers[sequence.id] for sequence in waiting]
        self._drained.clear()
        self._advance()
        self._work.set()
        await self._drained.wait()

    def resume(self) -> None:
        self.pause_mode = None
        self.scheduler.resume(self._virtual_s())
        held, self._held = self._held, []
        for answer in held:
            self._enqueue(answer)
        self._work.set()

    def take_weights(self, model: TokenModel) -> None:
        """Install new weights. Running requests continue with the new weights."""
        self._advance()
        self.model = model
        for answer in self._answers.values():
            answer.generation.follow(model)

    def name_weights(self, version: str) -> None:
        """Name the weights that generate the next tokens."""
        self._advance()
        self.weight_version = version

    def reshape(self, shape: EngineShape) -> None:
        """Change the batch size, the KV capacity and the step times. Running requests are prefilled again."""
        self._advance()
        self._preempt_running()
        self.scheduler.reshape(shape)
        self._work.set()

    async def run(self) -> None:
        """Advance the scheduler as the clock advances, until cancelled."""
        while True:
            await self._work.wait()
            self._advance()
            if self.scheduler.idle or self.scheduler.paused:
                self._work.clear()
            await self._clock.sleep(self._options.tick_s)

    def _virtual_s(self) -> float:
        return (self._clock.now_s() - self.began_s) * self._options.speed

    def _enqueue(self, answer: SimulatedAnswer) -> None:
        self._advance()
        context_tokens = len(answer.request.prompt_ids) + answer.made
        left = answer.ending.tokens - answer.made
        loaded = answer.made == 0 and answer.loaded_tokens > 0
        self.scheduler.submit(self._virtual_s(), answer.id, context_tokens, left, prefilled=loaded)
        self._work.set()

    def _advance(self) -> None:
        for progress in self.scheduler.advance(self._virtual_s()):
            self._hand_out(progress)
        if not self.scheduler.running:
            self._drained.set()

    def _hand_out(self, progress: SequenceProgress) -> None:
        answer = self._answers[progress.id]
        if answer.made == 0:
            self.prompt_tokens_total += len(answer.request.prompt_ids)
            self.loaded_tokens_total += answer.loaded_tokens
        answer.make(progress.tokens, self.weight_version)
        if answer.finished:
            directory, wish = self._options.kv_directory, answer.request.handover
            if directory is not None and wish is not None and wish.save is not None and wish.at_end:
                computed = [*answer.request.prompt_ids, *answer.made_ids[:-1]]
                save_kv(directory, wish, computed)
            self.finished_total[answer.ending.finish_reason] += 1
            del self._answers[answer.id]

    def _abort(self, answers: list[SimulatedAnswer]) -> None:
        self._advance()
        self._save(answers)
        for answer in answers:
            if (loading := self._loading.pop(answer.id, None)) is not None:
                loading.cancel()
        self.scheduler.abort([answer.id for answer in answers])
        self._held = [answer for answer in self._held if answer not in answers]
        for answer in answers:
            if self._answers.pop(answer.id, None) is not None:  # otherwise it has just finished
                answer.finish("abort")
        if not self.scheduler.running:
            self._drained.set()

    def _save(self, answers: list[SimulatedAnswer]) -> None:
        """Save the KV of aborted requests that ask for it. For a request that was not running or had generated no
        token, write an empty entry."""
        running, directory = {sequence.id for sequence in self.scheduler.running}, self._options.kv_directory
        for answer in answers:
            wish = answer.request.handover
            if directory is not None and wish is not None and wish.save is not None and answer.id in self._answers:
                there = answer.id in running and answer.made > 0
                save_kv(directory, wish, [*answer.request.prompt_ids, *answer.made_ids] if there else [])

    def _preempt_running(self) -> None:
        """Return every running request to the head of the queue and drop its KV."""
        scheduler = self.scheduler
        scheduler.preemptions_total += len(scheduler.running)
        for sequence in scheduler.abort([s.id for s in (*scheduler.running, *scheduler.waiting)]):
            scheduler.submit(scheduler.now_s, sequence.id, sequence.context_tokens, sequence.to_generate)
