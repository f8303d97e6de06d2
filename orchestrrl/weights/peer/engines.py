"""Manage the engines into which a peer installs versions. Operations on one engine are serialized, and the versions of
all engines are polled."""

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

CALL_S = 30.0  # limit for an answer of a busy engine, e.g. to a pause; loads have their own limit
ASK_S = 10.0  # limit for a query of the version; a poll repeats it later
SOON_S = 2.0  # limit for optional queries


@dataclass(slots=True)
class _Own:
    engine: Engine
    given: bool  # assigned by the daemon
    has: LoadedWeights | None = None
    brought: LoadedWeights | None = None  # installed by this process
    at_work: asyncio.Lock = field(default_factory=asyncio.Lock)
    logged: str = ""  # the last logged reason why a query failed


class PeerEngines:
    """The engines of one peer. `changed` is called when the known version of an engine changes."""

    def __init__(
        self,
        engines: Mapping[EngineId, str],
        product: str,
        clock: Clock,
        changed: Callable[[], None],
        given: Mapping[EngineId, str] = MappingProxyType({}),
    ) -> None:
        """Connect to the engines of the command line (`engines`) and to the engines that the daemon has assigned
        (`given`)."""
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
        """Serve these engines and the engines of the command line; return a description of the change. A new engine is
        reported only after its version has been queried, so that it does not look like an engine that has lost its
        weights. The connection to a dropped engine is closed after the running operation on it has ended."""
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
        return f"{len(come)} added, {len(gone)} removed"

    async def watch(self, interval_s: float) -> None:
        while True:
            await self.refresh()
            # Reading a new server's configuration takes seconds, so do it early. It has been read if it has a version.
            await self.take_sums([own for own in self._own.values() if own.has is None], ASK_S)
            await self._clock.sleep(interval_s)

    async def refresh(self) -> None:
        """Query the version of each engine. An engine that does not answer keeps its last known version until it
        answers again, even if it has been restarted in the meantime."""
        await asyncio.gather(*(self._refresh(name, own) for name, own in self._own.items()))

    async def install(
        self, name: EngineId, version: int, folder: Path, by_s: float, *, is_other: bool, known_sum: str = ""
    ) -> tuple[LoadedWeights, str]:
        """Install a version; return the weights that the engine then has, and a description of the outcome. `is_other`
        is set if the bytes that the engine last received differ from this version's bytes, even if the version number
        is the same. `known_sum` is the checksum of the folder, or empty if it is not known. Raises the errors of
        `load_weights`, and Permanent if the deadline `by_s` has passed."""
        own = self._one(name)
        async with own.at_work:
            self._still(by_s)
            weights = weights_engine(own.engine)
            has = None if is_other else await self._loaded(own)
            if has is not None and has.version == version and has.sum:
                self._has(own, has)
                return has, f"{name} already has version {version}"
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
        """Query the version of an engine; return a message that contains the version. Raises the errors of the engine's
        client, and Retryable if the engine does not answer within `ASK_S`."""
        own = self._one(name)
        async with own.at_work:
            await self._ask(name, own)
        return f"{name} has {'weights without a version' if own.has is None else f'version {own.has.version}'}"

    async def go_on(self, name: EngineId, prompt_ids: Sequence[int], tokens: int, by_s: float) -> tuple[int, ...]:
        own = self._one(name)
        async with own.at_work:
            self._still(by_s)
            return tuple(await weights_engine(own.engine).continue_greedily(prompt_ids, tokens))

    async def rest(self, name: EngineId, at_rest: bool, drain_s: float = 0.0, *, ends: bool = False) -> str:
        """If `at_rest` is True, pause an engine and drop its KV cache; otherwise resume it. Return a message that
        contains the new state. Running requests may finish within `drain_s`; if they do not, the engine continues and
        Retryable is raised. If `ends` is True, running requests are aborted at once."""
        own = self._one(name)
        async with own.at_work:
            if not at_rest:
                await own.engine.resume()
                return f"{name} is running"
            if ends:
                await own.engine.pause(PauseMode.ABORT)
            elif drain_s and not await own.engine.is_paused():  # requests of a paused engine would never finish
                await self._drain(name, own, drain_s)
            await own.engine.pause(PauseMode.KEEP, drop_kv=True)
            return f"{name} is paused"

    async def _drain(self, name: EngineId, own: _Own, drain_s: float) -> None:
        try:
            async with asyncio.timeout(drain_s):
                await own.engine.pause(PauseMode.WAIT)
        except TimeoutError as error:
            await own.engine.resume()
            raise Retryable(f"the requests of engine {name} did not finish within {drain_s:g} s", drain_s) from error

    async def act(self, order: BackendAct) -> str:
        """Perform an act of a direct backend at an engine; return its result as JSON. Raises the backend's errors, and
        Permanent if the deadline of the order has passed."""
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
                    raise OutcomeUnknown(
                        f"cannot read the version of engine {order.engine} after action {order.act!r}: {error}"
                    ) from error
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
        if own.at_work.locked():  # during a load the engine has neither version
            return
        async with own.at_work:
            try:
                await self._ask(name, own)
                own.logged = ""
            except OrchestrRLError as error:
                if not isinstance(error, Retryable | OutcomeUnknown):
                    self._has(own, None)
                if str(error) != own.logged:
                    logger.warning("%s: querying its weight version failed: %s", name, error)
                    own.logged = str(error)

    async def _ask(self, name: EngineId, own: _Own) -> None:
        try:
            async with asyncio.timeout(ASK_S):
                self._has(own, await self._loaded(own))
        except TimeoutError as error:
            raise Retryable(f"engine {name} did not report its version within {ASK_S:g} s", ASK_S) from error

    async def take_sums(self, owns: Iterable[_Own] | None = None, within_s: float = SOON_S) -> bool:
        """Return whether any engine needs the checksum of the version's folder before it loads the version. If `owns`
        is given, only these engines are queried. An engine that does not answer within `within_s` is ignored."""

        async def one(engine: Engine) -> bool:
            with suppress(OrchestrRLError, TimeoutError):  # the operation that needs the engine reports the error
                async with asyncio.timeout(within_s):
                    return await weights_engine(engine).takes_sums()
            return False

        return any(await asyncio.gather(*(one(own.engine) for own in (self._own.values() if owns is None else owns))))

    async def _loaded(self, own: _Own) -> LoadedWeights | None:
        """Return the weights that the engine reports. If the engine reports no checksum and this process installed the
        reported version, return the weights with the checksum from the installation."""
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
            raise Permanent(f"the order was not executed, because its deadline passed {late_s:.3g} s ago")

    def _one(self, name: EngineId) -> _Own:
        if name not in self._own:
            raise Permanent(f"this peer does not serve engine {name!r}; it serves {', '.join(self._own) or 'none'}")
        return self._own[name]
