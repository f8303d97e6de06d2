"""The conformance suite for deployers. Subclass it, implement `make_deployer`, and run pytest (asyncio mode auto):

    class TestMine(DeployerConformance):
        @pytest.fixture(autouse=True)
        def in_folder(self, tmp_path):
            self.folder = tmp_path

        async def make_deployer(self, fleet: str) -> Deployer:
            # must return a new deployer; a name identifies one FleetIdentity, and is a DNS label
            return MyDeployer(stub_launch(self.folder), FleetIdentity(fleet, str(self.folder / fleet)), {}, WallClock())

Four GPUs, 0 to 3, must be free. The method `spec` returns the specs of the engines. By default, each engine is the stub
in this module, an HTTP server that answers every request with status 200 and reads its behaviour from its environment.
If a harness cannot produce a behaviour, such as a container that never exits, add the behaviour to `cannot` with the
reason. The tests of this behaviour are then skipped with this reason.
"""

import asyncio
import re
import secrets
import socket
import sys
import uuid
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from unittest import SkipTest

import aiohttp
import pytest

from orchestrrl.core.config.launch import EngineDevice
from orchestrrl.core.errors import Permanent, Retryable
from orchestrrl.fleet.deployers.base import DeployedInstance, Deployer, EngineLife
from orchestrrl.fleet.deployers.command_line import EngineLaunch, EngineSpec
from orchestrrl.fleet.deployers.machine import hold_port
from planner.model import ConfigurationId, EngineId, GpuId, Parallelism

DEADLINE_S = 60.0
POLL_S = 0.05
LAST_WORDS = "the stub exits on purpose"
BEHAVIOUR = "STUB_BEHAVIOUR"
NO = (Permanent, Retryable)  # nothing was changed
ONE, TWO = EngineId("e-one"), EngineId("e-two")

# Below the kernel's ephemeral ports. The process that holds the lock of a range owns its ports.
PORTS, RANGE, RANGES = 20_000, 100, 100
LOCKS = PORTS + RANGE * RANGES
_locks: deque[socket.socket] = deque(maxlen=10)  # locks of this process's latest ranges


class EngineBehaviour(StrEnum):
    """The behaviours of engines that the suite requires, which the stub implements."""

    SERVES = "serves"
    EXITS = "exits"  # prints LAST_WORDS and exits with status 3
    IGNORES_SIGTERM = "ignores_sigterm"
    HANGS = "hangs"  # during start-up: it never answers


STUB = """\
import os, signal, socket, sys, time
behaviour = os.environ.get("STUB_BEHAVIOUR", "serves")
if behaviour == "ignores_sigterm":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("the stub", os.getpid(), behaviour, flush=True)
if behaviour == "exits":
    print("the stub exits on purpose", flush=True)
    sys.exit(3)
if behaviour == "hangs" or "--port" not in sys.argv:
    time.sleep(600)
    sys.exit(4)
server = socket.socket()
server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
server.bind((sys.argv[sys.argv.index("--host") + 1], int(sys.argv[sys.argv.index("--port") + 1])))
server.listen()
server.settimeout(600)
while True:
    connection, _ = server.accept()
    connection.recv(65536)
    body = str(os.getpid()).encode()
    connection.sendall(b"HTTP/1.1 200 OK\\r\\nConnection: close\\r\\nContent-Length: %d\\r\\n\\r\\n" % len(body) + body)
    connection.close()
"""


def stub_launch(folder: Path, first_port: int = 0) -> EngineLaunch:
    """Write the stub to `folder` and return launch settings that use it as the Python interpreter. If `first_port` is
    0, a range of free ports is selected."""
    program = folder / "stub"
    program.write_text(f"#!{sys.executable} -IS\n{STUB}")
    program.chmod(0o755)
    return EngineLaunch(
        python=str(program), model="stub", device=EngineDevice.CPU, first_port=first_port or free_range()
    )


def free_range() -> int:
    """Return the first port of a range of RANGE free ports. Concurrent test processes get different ranges."""
    while True:
        number = secrets.randbelow(RANGES)
        first = PORTS + RANGE * number
        with suppress(OSError):
            lock = hold_port("127.0.0.1", [(LOCKS + number, False)])
            if len(_locks) == _locks.maxlen:
                _locks[0].close()
            _locks.append(lock)
            for port in range(first, first + RANGE):
                hold_port("127.0.0.1", [(port, False)]).close()
            return first


class DeployersUnderTest:
    """The deployers of one test, keyed by the name of their fleet."""

    def __init__(self, harness: "DeployerConformance") -> None:
        self._harness = harness
        self._prefix = f"c{uuid.uuid4().hex[:8]}"
        self._open: dict[str, Deployer] = {}

    async def deployer(self, fleet: str = "a") -> Deployer:
        if fleet not in self._open:
            self._open[fleet] = await self._harness.make_deployer(f"{self._prefix}-{fleet}")
        return self._open[fleet]

    async def anew(self, fleet: str = "a") -> Deployer:
        """Close the fleet's deployer and return a new deployer, as a restarted daemon would create it."""
        await (await self.deployer(fleet)).close()
        del self._open[fleet]
        return await self.deployer(fleet)

    async def clear(self) -> None:
        for deployer in self._open.values():
            for deployed in await deployer.list_engines():
                await deployer.stop(deployed.engine)
            await deployer.close()


def naming(*words: str) -> str:
    """Return a regular expression that matches any message that contains all of these words."""
    return "(?s)" + "".join(f"(?=.*{re.escape(word)})" for word in words)


async def until(deployer: Deployer, engine: EngineId, life: EngineLife) -> DeployedInstance:
    """Poll the engine's status until its state is `life`, and return the status. Raises TimeoutError after `DEADLINE_S`
    seconds."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            found = await deployer.status(engine)
            if found is not None and found.life is life:
                return found
            await asyncio.sleep(POLL_S)


def replicas(spec: EngineSpec, gpus: Sequence[int]) -> EngineSpec:
    """Return a copy of the spec with one replica on each of these GPUs."""
    return replace(spec, gpus=tuple(map(GpuId, gpus)), parallelism=Parallelism(dp=len(gpus), ep=len(gpus)))


def names(engines: Iterable[DeployedInstance]) -> list[str]:
    return [each.engine for each in engines]


class DeployerConformance:
    """The tests that every deployer must pass. The module's docstring describes how to use them."""

    cannot: Mapping[EngineBehaviour | str, str] = MappingProxyType({})

    async def make_deployer(self, fleet: str) -> Deployer:
        """Return a new deployer for the fleet of this name. Subclasses must override this method."""
        raise AssertionError("this harness does not override make_deployer")

    def spec(
        self,
        engine: EngineId,
        gpus: Sequence[int] = (0,),
        behaviour: EngineBehaviour = EngineBehaviour.SERVES,
        tp: int = 0,
    ) -> EngineSpec:
        """Return the spec of an engine with this behaviour. If `tp` is 0, the tensor-parallel size is the number of
        GPUs. Override this method if the stub cannot be started."""
        parallelism = Parallelism(tp=tp or len(gpus))
        return EngineSpec(
            engine=engine,
            configuration=ConfigurationId(f"tp{parallelism.tp}"),
            parallelism=parallelism,
            gpus=tuple(map(GpuId, gpus)),
            environment={BEHAVIOUR: behaviour.value},
        )

    async def answers(self, url: str) -> bool:
        """Return whether a server answers at the URL. Override this method if engines cannot be reached from the
        test."""
        try:
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
                async with session.get(url + "/health") as response:
                    return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    @pytest.fixture
    async def bench(self) -> AsyncIterator[DeployersUnderTest]:
        bench = DeployersUnderTest(self)
        try:
            yield bench
        finally:
            await bench.clear()

    @pytest.fixture
    async def deployer(self, bench: DeployersUnderTest) -> Deployer:
        return await bench.deployer()

    def need(self, behaviour: EngineBehaviour | str) -> None:
        """Skip the test if the harness has no engine with this behaviour."""
        if behaviour in self.cannot:
            raise SkipTest(f"{behaviour}: {self.cannot[behaviour]}")

    async def until_it_answers(self, deployer: Deployer, engine: EngineId) -> DeployedInstance:
        async with asyncio.timeout(DEADLINE_S):
            while True:
                found = await deployer.status(engine)
                assert found is not None
                assert found.life is not EngineLife.ENDED, found.detail
                if found.url and await self.answers(found.url):
                    return found
                await asyncio.sleep(POLL_S)

    # Start and stop.

    async def test_new_fleet_is_empty(self, deployer: Deployer) -> None:
        assert await deployer.list_engines() == ()
        assert await deployer.status(ONE) is None

    async def test_engine_answers_after_start_and_is_gone_after_stop(self, deployer: Deployer) -> None:
        spec = self.spec(ONE, (0, 1))
        started = await deployer.start(spec)
        assert started.life is not EngineLife.ENDED, started.detail
        assert (started.engine, started.configuration, started.gpus) == (ONE, spec.configuration, spec.gpus)
        assert started.url
        assert not started.lent
        found = await self.until_it_answers(deployer, ONE)
        assert found.life is EngineLife.ALIVE
        assert found.url == started.url
        assert found.spec is not None
        assert (found.spec.engine, found.spec.parallelism, found.spec.gpus) == (ONE, spec.parallelism, spec.gpus)
        assert (await deployer.list_engines()) == (found,)
        await deployer.stop(ONE)
        assert not await self.answers(started.url)
        assert await deployer.status(ONE) is None
        assert await deployer.list_engines() == ()

    async def test_two_engines_have_different_urls(self, deployer: Deployer) -> None:
        started = [await deployer.start(self.spec(engine, (gpu,))) for gpu, engine in enumerate((TWO, ONE))]
        assert len({each.url for each in started}) == 2
        for engine in (ONE, TWO):
            await self.until_it_answers(deployer, engine)
        assert names(await deployer.list_engines()) == sorted((ONE, TWO))
        await deployer.stop(TWO)
        assert names(await deployer.list_engines()) == [ONE]
        await self.until_it_answers(deployer, ONE)

    async def test_repeated_start_with_same_spec_changes_nothing(self, deployer: Deployer) -> None:
        spec = self.spec(ONE)
        before = await deployer.start(spec)
        await self.until_it_answers(deployer, ONE)
        assert (await deployer.start(spec)).url == before.url
        assert len(await deployer.list_engines()) == 1
        await self.until_it_answers(deployer, ONE)

    async def test_stop_of_missing_engine_changes_nothing(self, deployer: Deployer) -> None:
        await deployer.stop(ONE)
        await deployer.start(self.spec(TWO))
        await deployer.stop(ONE)
        assert names(await deployer.list_engines()) == [TWO]
        await deployer.stop(TWO)
        await deployer.stop(TWO)
        assert await deployer.list_engines() == ()

    async def test_stopped_engine_starts_again_with_another_spec(self, deployer: Deployer) -> None:
        await deployer.start(self.spec(ONE, (0,)))
        await deployer.stop(ONE)
        await deployer.start(self.spec(ONE, (0, 1)))
        assert (await self.until_it_answers(deployer, ONE)).gpus == (0, 1)

    async def test_close_keeps_engines_running_and_is_idempotent(
        self, bench: DeployersUnderTest, deployer: Deployer
    ) -> None:
        started = await deployer.start(self.spec(ONE))
        await self.until_it_answers(deployer, ONE)
        await deployer.close()
        await deployer.close()
        assert await self.answers(started.url)
        await bench.anew()

    # Refusals.

    async def test_start_of_running_id_with_another_spec_is_refused(self, deployer: Deployer) -> None:
        before = await deployer.start(self.spec(ONE, (0,)))
        for other in (self.spec(ONE, (1,)), self.spec(ONE, (0, 1)), self.spec(ONE, (0,), EngineBehaviour.HANGS)):
            with pytest.raises(Permanent, match=naming(ONE)):
                await deployer.start(other)
        assert (await self.until_it_answers(deployer, ONE)).url == before.url
        assert names(await deployer.list_engines()) == [ONE]

    async def test_start_on_gpus_in_use_is_refused_with_the_owner(self, deployer: Deployer) -> None:
        await deployer.start(self.spec(ONE, (0, 1)))
        with pytest.raises(Permanent, match=naming(ONE, "1")):
            await deployer.start(self.spec(TWO, (1, 2)))
        assert names(await deployer.list_engines()) == [ONE]
        await deployer.stop(ONE)
        await deployer.start(self.spec(TWO, (1, 2)))
        await self.until_it_answers(deployer, TWO)

    async def test_concurrent_starts_of_one_id_create_one_engine(self, deployer: Deployer) -> None:
        spec = self.spec(ONE)
        both = await asyncio.gather(*(deployer.start(spec) for _ in range(4)), return_exceptions=True)
        started = [each for each in both if isinstance(each, DeployedInstance)]
        refused = [each for each in both if not isinstance(each, DeployedInstance)]
        assert started
        assert all(isinstance(each, Retryable) for each in refused), refused
        assert len({each.url for each in started}) == 1
        assert len(await deployer.list_engines()) == 1
        await self.until_it_answers(deployer, ONE)

    async def test_concurrent_starts_on_one_gpu_create_one_engine(self, deployer: Deployer) -> None:
        specs = [self.spec(ONE, (0, 1)), self.spec(TWO, (1, 2))]
        both = await asyncio.gather(*map(deployer.start, specs), return_exceptions=True)
        (started,) = [each for each in both if isinstance(each, DeployedInstance)]
        (refused,) = [each for each in both if not isinstance(each, DeployedInstance)]
        assert isinstance(refused, Permanent), refused
        assert names(await deployer.list_engines()) == [started.engine]
        await self.until_it_answers(deployer, started.engine)

    async def test_gpu_serves_one_engine_under_concurrent_starts_and_stops(self, deployer: Deployer) -> None:
        specs = [self.spec(ONE, (0, 1)), self.spec(TWO, (1, 2)), self.spec(EngineId("e-three"), (2, 3))]
        for turn in range(3):
            asked = [act for spec in specs for act in (deployer.start(spec), deployer.stop(spec.engine))]
            asked += [deployer.start(spec) for spec in specs[turn:]]
            outcomes = await asyncio.gather(*asked, return_exceptions=True)
            wrong = [each for each in outcomes if isinstance(each, BaseException) and not isinstance(each, NO)]
            assert not wrong
            held = [gpu for each in await deployer.list_engines() for gpu in each.gpus]
            assert len(held) == len(set(held))
        for spec in specs:
            await deployer.stop(spec.engine)
        assert await deployer.list_engines() == ()

    # Engines of an earlier deployer.

    async def test_new_deployer_finds_running_engines(self, bench: DeployersUnderTest, deployer: Deployer) -> None:
        spec = self.spec(ONE, (0, 1))
        started = await deployer.start(spec)
        await self.until_it_answers(deployer, ONE)
        deployer = await bench.anew()
        (found,) = await deployer.list_engines()
        assert (found.engine, found.gpus, found.url) == (ONE, (0, 1), started.url)
        assert found.life is EngineLife.ALIVE
        assert found.configuration == spec.configuration
        assert found.spec == started.spec
        assert (await deployer.start(spec)).url == started.url
        with pytest.raises(Permanent, match=naming(ONE)):
            await deployer.start(self.spec(TWO, (1,)))
        assert await self.answers(started.url)
        await deployer.stop(ONE)
        assert not await self.answers(started.url)
        assert await deployer.list_engines() == ()

    async def test_fleets_ignore_each_others_engines(self, bench: DeployersUnderTest) -> None:
        a, b = await bench.deployer("a"), await bench.deployer("b")
        mine, theirs = await a.start(self.spec(ONE, (0,))), await b.start(self.spec(ONE, (1,)))
        assert mine.url != theirs.url
        assert [each.gpus for each in await a.list_engines()] == [(0,)]
        assert [each.gpus for each in await b.list_engines()] == [(1,)]
        await a.stop(ONE)
        assert await a.list_engines() == ()
        await self.until_it_answers(b, ONE)
        assert [each.gpus for each in await (await bench.anew("b")).list_engines()] == [(1,)]

    # Ends.

    async def test_exited_engine_is_reported_with_its_log_and_keeps_gpus_until_stopped(
        self, bench: DeployersUnderTest, deployer: Deployer
    ) -> None:
        self.need(EngineBehaviour.EXITS)
        spec = self.spec(ONE, (0,), EngineBehaviour.EXITS)
        await deployer.start(spec)
        ended = await until(deployer, ONE, EngineLife.ENDED)
        assert LAST_WORDS in ended.detail
        assert ended.gpus == (0,)
        assert names(await deployer.list_engines()) == [ONE]
        with pytest.raises(Permanent, match=naming(ONE)):
            await deployer.start(self.spec(TWO, (0,)))
        deployer = await bench.anew()
        assert LAST_WORDS in (await until(deployer, ONE, EngineLife.ENDED)).detail
        await deployer.stop(ONE)
        assert await deployer.list_engines() == ()
        await deployer.start(self.spec(TWO, (0,)))
        await self.until_it_answers(deployer, TWO)

    async def test_ended_engine_is_not_restarted(self, deployer: Deployer) -> None:
        self.need(EngineBehaviour.EXITS)
        spec = self.spec(ONE, (0,), EngineBehaviour.EXITS)
        await deployer.start(spec)
        await until(deployer, ONE, EngineLife.ENDED)
        assert (await deployer.start(spec)).life is EngineLife.ENDED

    async def test_engine_can_be_stopped_during_start_up(self, deployer: Deployer) -> None:
        self.need(EngineBehaviour.HANGS)
        await deployer.start(self.spec(ONE, (0,), EngineBehaviour.HANGS))
        await deployer.stop(ONE)
        assert await deployer.list_engines() == ()
        starting = asyncio.create_task(deployer.start(self.spec(TWO, (0,))))
        await asyncio.sleep(0)
        await asyncio.gather(starting, deployer.stop(TWO), return_exceptions=True)
        await deployer.stop(TWO)
        assert await deployer.list_engines() == ()

    async def test_engine_that_ignores_sigterm_is_killed(self, deployer: Deployer) -> None:
        self.need(EngineBehaviour.IGNORES_SIGTERM)
        await deployer.start(self.spec(ONE, (0,), EngineBehaviour.IGNORES_SIGTERM))
        started = await self.until_it_answers(deployer, ONE)
        async with asyncio.timeout(DEADLINE_S):
            await deployer.stop(ONE)
        assert not await self.answers(started.url)
        assert await deployer.list_engines() == ()

    async def test_concurrent_stops_of_one_engine_succeed(self, deployer: Deployer) -> None:
        started = await deployer.start(self.spec(ONE))
        await self.until_it_answers(deployer, ONE)
        await asyncio.gather(*(deployer.stop(ONE) for _ in range(3)))
        assert not await self.answers(started.url)
        assert await deployer.list_engines() == ()

    # GPUs of sleeping engines.

    async def test_lend_is_refused_unless_declared(self, deployer: Deployer) -> None:
        with pytest.raises(Permanent):
            await deployer.lend(ONE, lent=True)
        if deployer.can_lend:
            return
        await deployer.start(self.spec(ONE))
        with pytest.raises(Permanent):
            await deployer.lend(ONE, lent=True)
        found = await deployer.status(ONE)
        assert found is not None
        assert not found.lent

    async def test_lent_gpus_serve_another_engine_until_reclaimed(
        self, bench: DeployersUnderTest, deployer: Deployer
    ) -> None:
        if not deployer.can_lend:
            raise SkipTest("the deployer declares that it cannot lend GPUs")
        await deployer.start(self.spec(ONE, (0, 1)))
        await deployer.lend(ONE, lent=True)
        await deployer.lend(ONE, lent=True)
        await deployer.start(self.spec(TWO, (1, 2)))
        deployer = await bench.anew()
        assert [(each.engine, each.lent) for each in await deployer.list_engines()] == [(ONE, True), (TWO, False)]
        with pytest.raises(Permanent, match=naming(TWO)):
            await deployer.lend(ONE, lent=False)
        with pytest.raises(Permanent, match=naming(TWO)):
            await deployer.start(self.spec(EngineId("e-three"), (2,)))
        await deployer.stop(TWO)
        await deployer.lend(ONE, lent=False)
        await deployer.lend(ONE, lent=False)
        found = await self.until_it_answers(deployer, ONE)
        assert not found.lent
        with pytest.raises(Permanent, match=naming(ONE)):
            await deployer.start(self.spec(TWO, (1, 2)))

    # GPUs of engines that are scaled.

    async def test_scale_is_refused_unless_declared(self, deployer: Deployer) -> None:
        spec = self.spec(ONE)
        with pytest.raises(Permanent):
            await deployer.scale(spec)
        if deployer.can_scale:
            return
        await deployer.start(spec)
        with pytest.raises(Permanent):
            await deployer.scale(replicas(spec, (0, 1)))
        found = await deployer.status(ONE)
        assert found is not None
        assert found.gpus == (0,)

    async def test_scaled_engine_has_its_new_spec(self, bench: DeployersUnderTest, deployer: Deployer) -> None:
        spec = self.spec(ONE)
        if not deployer.can_scale:
            raise SkipTest("the deployer declares that it cannot scale engines")
        started = await deployer.start(spec)
        await deployer.start(self.spec(TWO, (3,)))
        with pytest.raises(Permanent, match=naming(TWO, "3")):
            await deployer.scale(replicas(spec, (0, 3)))
        wide = replicas(spec, (0, 1, 2))
        for _ in range(2):
            scaled = await deployer.scale(wide)
            assert (scaled.gpus, scaled.url, scaled.life) == ((0, 1, 2), started.url, EngineLife.ALIVE)
        deployer = await bench.anew()
        found = await self.until_it_answers(deployer, ONE)
        assert (found.gpus, found.spec) == ((0, 1, 2), wide)
        assert (await deployer.start(wide)).url == started.url
        with pytest.raises(Permanent, match=naming(ONE)):
            await deployer.start(self.spec(EngineId("e-three"), (2,)))
        await deployer.scale(spec)
        await deployer.start(self.spec(EngineId("e-three"), (1, 2)))
        await deployer.stop(ONE)
        assert names(await deployer.list_engines()) == ["e-three", TWO]
