"""The engines that a peer installs versions into: one at a time each, and what they have, asked every few seconds."""

import asyncio
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from orchestrrl.core.clock import Clock
from orchestrrl.core.errors import OrchestrRLError, OutcomeUnknown, Permanent, Retryable
from orchestrrl.core.operations import PauseMode
from orchestrrl.engines.base import Engine, LoadedWeights, connect, weights_engine
from orchestrrl.weights.backends.base import DirectBackend, make_direct
from orchestrrl.weights.model import EngineAt
from orchestrrl.weights.orders import BackendAct
from planner.model import EngineId

logger = logging.getLogger(__name__)

CALL_S = 30.0  # of a busy engine's answer, e.g. that it is paused; loads have a limit of their own
ASK_S = 10.0  # an engine that does not say so soon what it has is asked again later
SOON_S = 2.0  # nothing waits longer for what can do without


@dataclass(slots=True)
class _Own:
    engine: Engine
    given: bool  # by the daemon
    has: LoadedWeights | None = None
    brought: LoadedWeights | None = None  # by this process
    at_work: asyncio.Lock = field(default_factory=asyncio.Lock)
    logged: str = ""  # why it could not be asked, as it was logged last


class PeerEngines:
    """`changed` is called when an engine has another version than was known."""

    def __init__(
        self,
        engines: Mapping[EngineId, str],
        product: str,
        clock: Clock,
        changed: Callable[[], None],
        given: Mapping[EngineId, str] = MappingProxyType({}),
    ) -> None:
        """`given`: those that the daemon told of."""
        self._product = product
        self._own = {name: self._made(url, name not in engines) for name, url in {**given, **engines}.items()}
        self._clock = clock
        self._changed = changed
        self._backends: dict[str, DirectBackend] = {}
        self._serving = asyncio.Lock()
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def report(self) -> tuple[EngineAt, ...]:
        return tuple(
            EngineAt(name, own.engine.url, None if own.has is None else own.has.version, own.given)
            for name, own in sorted(self._own.items())
        )

    async def serve(self, engines: Mapping[EngineId, str]) -> str:
        """These, and those that it was started with. One that is new is told of once it has said what it has: nobody
        shall take it for one that has lost its weights. What runs on one that goes comes to its end."""
        async with self._serving:
            given = {name: own for name, own in self._own.items() if own.given}
            come = {
                name: self._made(url, given=True)
                for name, url in engines.items()
                if name not in self._own or (name in given and given[name].engine.url != url)
            }
            await asyncio.gather(*(self._refresh(name, own) for name, own in come.items()))
            gone = [name for name in given if name not in engines or name in come]
            for name in gone:
                self._close_later(self._own.pop(name))
            self._own |= come
        return f"{len(come)} came, {len(gone)} went"

    async def watch(self, interval_s: float) -> None:
        while True:
            await self.refresh()
            # A fresh server takes seconds; of one that names its version this is known since it was asked for that.
            await self.take_sums([own for own in self._own.values() if own.has is None], ASK_S)
            await self._clock.sleep(interval_s)

    async def refresh(self) -> None:
        """What each has. One that does not answer has what it had: if it was started anew it will say so."""
        await asyncio.gather(*(self._refresh(name, own) for name, own in self._own.items()))

    async def install(
        self, name: EngineId, version: int, folder: Path, by_s: float, *, is_other: bool, known_sum: str = ""
    ) -> tuple[LoadedWeights, str]:
        """What it then has, and how that came. `is_other`: what it was given last were other bytes, whatever they were
        called. `known_sum`: the folder's. Raises as the engine does, and Permanent where `by_s` is over."""
        own = self._one(name)
        async with own.at_work:
            self._still(by_s)
            weights = weights_engine(own.engine)
            has = None if is_other else await self._loaded(own)
            if has is not None and has.version == version and has.sum:
                self._has(own, has)
                return has, f"{name} has version {version} already"
            began_s = self._clock.now_s()
            try:
                loaded = await weights.load_weights(folder, version, known_sum)
            except OutcomeUnknown:
                own.brought = None
                self._has(own, None)
                raise
            own.brought = loaded
            self._has(own, loaded)
            return loaded, f"{name} loaded version {version} in {self._clock.now_s() - began_s:.3g} s"

    async def refresh_one(self, name: EngineId) -> str:
        """What it has now. Raises as the engine does, and Retryable where it does not answer soon."""
        own = self._one(name)
        async with own.at_work:
            await self._ask(name, own)
        return f"{name} has {'weights that nobody named' if own.has is None else f'version {own.has.version}'}"

    async def go_on(self, name: EngineId, prompt_ids: Sequence[int], tokens: int, by_s: float) -> tuple[int, ...]:
        own = self._one(name)
        async with own.at_work:
            self._still(by_s)
            return tuple(await weights_engine(own.engine).continue_greedily(prompt_ids, tokens))

    async def rest(self, name: EngineId, at_rest: bool, drain_s: float = 0.0, *, ends: bool = False) -> str:
        """`drain_s`: what runs has so long to come to its end, where the engine runs. Raises Retryable where it does
        not, and the engine goes on."""
        own = self._one(name)
        async with own.at_work:
            if not at_rest:
                await own.engine.resume()
                return f"{name} runs"
            if ends:
                await own.engine.pause(PauseMode.ABORT)
            elif drain_s and not await own.engine.is_paused():  # what is frozen does not end
                await self._drain(name, own, drain_s)
            await own.engine.pause(PauseMode.KEEP, drop_kv=True)
            return f"{name} is paused"

    async def _drain(self, name: EngineId, own: _Own, drain_s: float) -> None:
        try:
            async with asyncio.timeout(drain_s):
                await own.engine.pause(PauseMode.WAIT)
        except TimeoutError as error:
            await own.engine.resume()
            raise Retryable(f"{name}: its requests did not end within {drain_s:g} s: it goes on", drain_s) from error

    async def act(self, order: BackendAct) -> str:
        """What the backend's part here tells. Raises as that does, and Permanent where it is too late."""
        own = self._one(order.engine)
        backend = self._backends.get(order.backend) or make_direct(order.backend)
        self._backends[order.backend] = backend
        async with own.at_work:
            self._still(order.valid_until_s)
            body = {**json.loads(order.body_json), "within_s": order.valid_until_s - self._clock.now_s()}
            try:
                told = await backend.at_engine(own.engine, order.act, order.version, body)
            except OutcomeUnknown:
                if order.changes:
                    own.brought = None
                    self._has(own, None)
                raise
            if order.changes:
                own.brought = None
                try:
                    self._has(own, await self._loaded(own))
                except OrchestrRLError as error:
                    self._has(own, None)
                    raise OutcomeUnknown(f"{order.act} was done, but then: {error}") from error
            return json.dumps(dict(told))

    async def close(self) -> None:
        for own in self._own.values():
            await own.engine.close()
        await asyncio.gather(*self._closing, return_exceptions=True)

    def _made(self, url: str, given: bool) -> _Own:
        return _Own(connect(self._product, url, timeout_s=CALL_S), given)

    def _close_later(self, own: _Own) -> None:
        async def close() -> None:
            async with own.at_work:
                await own.engine.close()

        task = asyncio.create_task(close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _refresh(self, name: EngineId, own: _Own) -> None:
        if own.at_work.locked():  # in the middle of a load it has neither
            return
        async with own.at_work:
            try:
                await self._ask(name, own)
                own.logged = ""
            except OrchestrRLError as error:
                if not isinstance(error, Retryable | OutcomeUnknown):
                    self._has(own, None)
                if str(error) != own.logged:
                    logger.warning("%s: does not say which weights it has: %s", name, error)
                    own.logged = str(error)

    async def _ask(self, name: EngineId, own: _Own) -> None:
        try:
            async with asyncio.timeout(ASK_S):
                self._has(own, await self._loaded(own))
        except TimeoutError as error:
            raise Retryable(f"{name}: no answer within {ASK_S:g} s", ASK_S) from error

    async def take_sums(self, owns: Iterable[_Own] | None = None, within_s: float = SOON_S) -> bool:
        """Whether any would have the sum of a folder taken in a load, and says so soon."""

        async def one(engine: Engine) -> bool:
            with suppress(OrchestrRLError, TimeoutError):  # it is said by whatever needs it
                async with asyncio.timeout(within_s):
                    return await weights_engine(engine).takes_sums()
            return False

        return any(await asyncio.gather(*(one(own.engine) for own in (self._own.values() if owns is None else owns))))

    async def _loaded(self, own: _Own) -> LoadedWeights | None:
        """Its own word. It may name a version without a sum of it: that is told again as it was when it was brought."""
        has = await weights_engine(own.engine).loaded()
        if has is None or own.brought is None or has.version != own.brought.version:
            own.brought = None
        elif not has.sum:
            return own.brought
        return has

    def _has(self, own: _Own, has: LoadedWeights | None) -> None:
        before = own.has
        own.has = has
        if (before and before.version) != (has and has.version):
            self._changed()

    def _still(self, by_s: float) -> None:
        if (late_s := self._clock.now_s() - by_s) > 0:
            raise Permanent(f"was to begin {late_s:.3g} s ago at the latest")

    def _one(self, name: EngineId) -> _Own:
        if name not in self._own:
            raise Permanent(f"no engine {name!r} here; known: {', '.join(self._own) or 'none'}")
        return self._own[name]
