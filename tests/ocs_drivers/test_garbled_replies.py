"""For any reply of a device, a driver returns a result or raises a driver error, and its process survives.

More rounds with another seed: ORCHESTRRL_FUZZ_ROUNDS=100 ORCHESTRRL_FUZZ_SEED=7.
"""

import asyncio
import logging
import os
import random
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from garbling import Garbler, garble_message, garbled_json, garbled_text

from ocs_drivers.base import OcsDriver, SystemClock
from ocs_drivers.emulators import gnmi as gnmi_emulator
from ocs_drivers.emulators import netconf as netconf_emulator
from ocs_drivers.emulators.base import DevicePanel
from ocs_drivers.emulators.registry import DRIVER_OPTIONS, make_emulator
from ocs_drivers.errors import DriverError
from ocs_drivers.model import ChangeMode, CircuitChange, CircuitDiff, CrossConnect
from ocs_drivers.registry import make_driver
from ocs_drivers.virtual import VirtualSwitch
from orchestrrl.rpc import ocs_server

ROUNDS = int(os.environ.get("ORCHESTRRL_FUZZ_ROUNDS", "4"))
SEED = int(os.environ.get("ORCHESTRRL_FUZZ_SEED", "1"))
PANEL = DevicePanel(ingress_ports=4, egress_ports=4, reconfiguration_s=0.002)
TCP = ("scpi", "scpi-dicon", "tl1-polatis", "tl1-calient", "tl1-glimmerglass", "restconf", "calient_rest")


class HastyClock(SystemClock):
    """Limits every sleep to 0.03 s, because truncated replies are frequent."""

    async def sleep(self, duration_s: float) -> None:
        await asyncio.sleep(min(max(duration_s, 0.0), 0.03))


class Attempts:
    """Calls of a driver, with a count of the errors that are not driver errors."""

    def __init__(self) -> None:
        self.strays: Counter[str] = Counter()

    async def __call__(self, call: Awaitable[Any]) -> Any:
        try:
            return await call
        except DriverError:
            pass
        except Exception as error:  # noqa: BLE001  # all of them are reported at the end
            where = traceback.extract_tb(error.__traceback__)[-1]
            self.strays[f"{Path(where.filename).name}:{where.lineno} {where.name}: {error!r}"[:200]] += 1
        return None


async def use(driver: OcsDriver, rng: random.Random, attempt: Attempts) -> None:
    """Call every method of the contract, several times, continuing after errors."""
    for _ in range(4):
        facts = await attempt(driver.facts())
        await attempt(driver.capabilities())
        await attempt(driver.ports())
        reading = await attempt(driver.cross_connects())
        egress = facts.egress_ports if facts else range(5, 9)
        pairs = (CrossConnect(1, egress[0]), CrossConnect(2, egress[-1]))
        mode = rng.choice(list(ChangeMode))
        diff = await attempt(driver.plan(CircuitChange(pairs), mode))
        if diff is None:
            revision = reading.revision if reading else 0
            diff = CircuitDiff(ChangeMode.SAFE, revision, frozenset(), (), tuple(sorted(pairs)))
        result = await attempt(driver.commit(diff, diff.revision, rng.choice((None, 5.0))))
        await attempt(driver.verify(diff))
        await attempt(driver.confirm(result.revision if result else 0))
        await attempt(driver.take_over(pairs))
        await attempt(driver.rollback(diff))
        events = driver.watch()
        listening = asyncio.ensure_future(attempt(anext(events)))
        await asyncio.wait({listening}, timeout=0.02)
        listening.cancel()
        await asyncio.wait({listening})
        await attempt(events.aclose())
        await attempt(driver.close())


@pytest.fixture
def defects(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.ERROR, "ocs_drivers")
    return caplog


async def rounds(driver_name: str, options: dict[str, Any], rng: random.Random, caplog: Any) -> None:
    attempt = Attempts()
    for _ in range(ROUNDS):
        driver = make_driver(driver_name, "ocs1", options, HastyClock())
        try:
            await use(driver, rng, attempt)
        finally:
            await attempt(driver.close())
    assert not attempt.strays, "\n".join(f"{count} x {stray}" for stray, count in attempt.strays.items())
    # An error that a wire did not translate is logged, and so is an unhandled error of a task.
    ours = ("ocs_drivers.driver", "ocs_drivers.tl1_session", "asyncio")
    assert [f"{each.getMessage()} {each.exc_info}" for each in caplog.records if each.name in ours] == []


@pytest.mark.parametrize("protocol", TCP)
async def test_tcp_drivers_survive_garbled_replies(protocol: str, defects: pytest.LogCaptureFixture) -> None:
    rng = random.Random(f"{protocol} {SEED}")
    emulator = make_emulator(protocol, PANEL)
    garbler = Garbler(rng, await emulator.start())
    options = {"address": await garbler.start(), **DRIVER_OPTIONS.get(protocol, {})}
    if protocol.startswith("tl1"):
        options["messages"] = "watch"
    try:
        await rounds(protocol.partition("-")[0], options, rng, defects)
    finally:
        await garbler.stop()
        await emulator.stop()


@pytest.mark.parametrize("protocol", ["gnmi", "gnmi-openconfig"])
async def test_gnmi_driver_survives_garbled_replies(
    protocol: str, monkeypatch: pytest.MonkeyPatch, defects: pytest.LogCaptureFixture
) -> None:
    rng = random.Random(f"{protocol} {SEED}")

    class Service(gnmi_emulator.GnmiEmulator):
        async def Capabilities(self, request: Any, context: Any) -> Any:
            return self._sent(await super().Capabilities(request, context))

        async def Get(self, request: Any, context: Any) -> Any:
            return self._sent(await super().Get(request, context))

        async def Subscribe(self, requests: Any, context: Any) -> AsyncIterator[Any]:
            async for response in super().Subscribe(requests, context):
                yield self._sent(response)

        def _sent(self, message: Any) -> Any:
            if rng.random() < 0.3:
                spoil_values(rng, message)
            return message

    monkeypatch.setattr(gnmi_emulator, "GnmiEmulator", Service)
    emulator = make_emulator(protocol, PANEL)
    options = {"address": await emulator.start(), **DRIVER_OPTIONS[protocol]}
    try:
        await rounds("gnmi", options, rng, defects)
    finally:
        await emulator.stop()


def spoil_values(rng: random.Random, message: Any) -> None:
    """Garble a gNMI message, mostly the JSON in it."""
    notifications = list(getattr(message, "notification", ())) or [getattr(message, "update", None)]
    values = [update.val for each in notifications if each is not None for update in each.update]
    if not values or rng.random() < 0.3:
        garble_message(rng, message)
        return
    value = rng.choice(values)
    text = value.json_ietf_val.decode()
    value.json_ietf_val = (garbled_json(rng, text) if rng.random() < 0.8 else garbled_text(rng, text)).encode()


async def test_netconf_driver_survives_garbled_replies(
    monkeypatch: pytest.MonkeyPatch, defects: pytest.LogCaptureFixture
) -> None:
    rng = random.Random(f"netconf {SEED}")

    class Emulator(netconf_emulator.NetconfEmulator):
        def capabilities(self) -> list[str]:
            return [garbled_text(rng, each) if rng.random() < 0.1 else each for each in super().capabilities()]

        async def answer(self, session: Any, message: bytes) -> tuple[bytes, bool]:
            reply, is_last = await super().answer(session, message)
            if rng.random() < 0.3:
                reply = garbled_text(rng, reply.decode()).encode()
            return reply, is_last

    emulator = Emulator(PANEL)
    options = {"address": await emulator.start(), "command_timeout_s": 0.2, **DRIVER_OPTIONS["netconf"]}
    try:
        await rounds("netconf", options, rng, defects)
    finally:
        await emulator.stop()


METHODS = ("GetFacts", "ListPorts", "ListCrossConnects", "Plan", "Commit", "TakeOver", "Verify", "Rollback")


def garbling_service(rng: random.Random) -> type[ocs_server.OcsDriverService]:
    """Return an `OcsDriverService` whose answers and errors are garbled."""

    def garbling(method: str) -> Any:
        async def answer(self: Any, request: Any, context: Any) -> Any:
            if rng.random() < 0.05:
                context.set_trailing_metadata(((ocs_server.ERROR_METADATA, rng.randbytes(rng.randint(0, 20))),))
                await context.abort(rng.choice(list(ocs_server.grpc.StatusCode)[1:]), "\x00odd")
            message = await getattr(ocs_server.OcsDriverService, method)(self, request, context)
            if rng.random() < 0.3:
                garble_message(rng, message)
            return message

        return answer

    return type("Garbling", (ocs_server.OcsDriverService,), {method: garbling(method) for method in METHODS})


@asynccontextmanager
async def garbling_process(rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    monkeypatch.setattr(ocs_server, "OcsDriverService", garbling_service(rng))
    switch = VirtualSwitch("there", ports=8, reconfiguration_s=0.002, link_timeout_s=0.02, tune_timeout_s=0.02)
    server, port = await ocs_server.serve_driver(switch, "127.0.0.1:0")
    yield f"127.0.0.1:{port}"
    await server.stop(None)


async def test_grpc_driver_survives_garbled_replies(
    monkeypatch: pytest.MonkeyPatch, defects: pytest.LogCaptureFixture
) -> None:
    rng = random.Random(f"grpc {SEED}")
    async with garbling_process(rng, monkeypatch) as target:
        await rounds("grpc", {"target": target}, rng, defects)
