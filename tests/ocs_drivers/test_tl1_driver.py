"""The driver `tl1` beyond the conformance suite: events, sessions, prompts, long lines, options."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest

from ocs_drivers.conformance import carry_out
from ocs_drivers.driver import DriverTimeouts
from ocs_drivers.emulators.base import DevicePanel
from ocs_drivers.emulators.registry import make_emulator
from ocs_drivers.emulators.tl1 import Tl1Emulator
from ocs_drivers.errors import DriverPermanent, DriverRetryable, InvalidOptions
from ocs_drivers.faults import DeviceFault, DeviceFaultKind
from ocs_drivers.model import BootBehaviour, CircuitChange, CrossConnect, EventKind, SwitchEvent
from ocs_drivers.registry import make_driver
from ocs_drivers.tl1 import Tl1Switch

DIALECTS = ("polatis", "calient", "glimmerglass")
FAST = DevicePanel(16, 16, reconfiguration_s=0.001)


@asynccontextmanager
async def emulated(
    dialect: str, panel: DevicePanel = FAST, quirks: dict[str, Any] | None = None, **options: Any
) -> AsyncIterator[tuple[Tl1Emulator, Tl1Switch]]:
    emulator = make_emulator(f"tl1-{dialect}", panel, **(quirks or {}))
    assert isinstance(emulator, Tl1Emulator)
    address = await emulator.start()
    given = {"address": address, "dialect": dialect, "command_timeout_s": 60.0, "tune_timeout_s": 20.0, **options}
    driver = make_driver("tl1", "ocs1", given)
    assert isinstance(driver, Tl1Switch)
    try:
        yield emulator, driver
    finally:
        await driver.close()
        await emulator.stop()


def pairs_of(dialect: str, count: int, ports: int) -> tuple[CrossConnect, ...]:
    """Return crossed pairs, so that no list of ports is a consecutive range."""
    offset = ports if dialect == "polatis" else 0
    return tuple(CrossConnect(port, offset + ports + 1 - port) for port in range(1, count + 1))


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_watched_reports_become_events(dialect: str) -> None:
    async with emulated(dialect, messages="watch") as (emulator, driver):
        assert (await driver.capabilities()).events
        seen: list[SwitchEvent] = []

        async def listen() -> None:
            async with aclosing(driver.watch()) as events:
                async for event in events:
                    seen.append(event)
                    heard.set()

        async def until(kind: EventKind) -> SwitchEvent:
            while not any(event.kind is kind for event in seen):
                await heard.wait()
                heard.clear()
            return next(event for event in seen if event.kind is kind)

        heard = asyncio.Event()
        await driver.facts()
        listening = asyncio.create_task(listen())
        await asyncio.sleep(0)
        (pair,) = pairs_of(dialect, 1, 16)
        await carry_out(driver, (pair,))
        assert (await until(EventKind.CIRCUIT)).cross_connect == pair
        emulator.device.inject(DeviceFault(DeviceFaultKind.FAIL_PORT, 5))
        event = await until(EventKind.PORT)
        assert event.port == 5
        assert "REPT" in event.text
        emulator.device.inject(DeviceFault(DeviceFaultKind.RESTART))
        assert "lost" in (await until(EventKind.ALARM)).text  # reported instead of silence
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)


@pytest.mark.parametrize(
    ("dialect", "messages", "verb"),
    [
        ("polatis", "silence", "OPR-ARC-EQPT::REPMGR:"),
        ("polatis", "watch", "RLS-ARC-EQPT::REPMGR:"),
        ("calient", "silence", "INH-MSG:::"),
        ("calient", "watch", "ALW-MSG:::"),
    ],
)
async def test_report_setting_changes_only_with_option_messages(dialect: str, messages: str, verb: str) -> None:
    async with emulated(dialect, messages=messages) as (emulator, driver):
        await driver.facts()
        assert any(command.startswith(verb) for command in emulator.commands)
    async with emulated(dialect) as (emulator, driver):
        await driver.facts()
        assert not any(command.startswith(verb.partition(":")[0]) for command in emulator.commands)
        with pytest.raises(DriverPermanent, match="does not support events"):
            await anext(driver.watch())


@pytest.mark.parametrize("dialect", ["polatis", "glimmerglass"])
async def test_whole_switch_is_one_line_or_split_by_limit(dialect: str) -> None:
    pairs, panel = pairs_of(dialect, 320, 320), DevicePanel(320, 320, reconfiguration_s=0.001)
    length = {"polatis": 2466, "glimmerglass": 3857}[dialect]
    async with emulated(dialect, panel) as (emulator, driver):
        assert (await carry_out(driver, pairs)).done
        (line,) = emulator.device.setters
        assert len(line + ";") == length
    async with emulated(dialect, panel, {"line_limit": 1024}, line_limit=1024) as (emulator, driver):
        result = await carry_out(driver, pairs)
        assert result.done
        assert len(emulator.device.setters) == 4
        assert max(map(len, emulator.device.setters)) < 1024
        assert (await carry_out(driver, disconnect=pairs)).done
    async with emulated(dialect, panel, {"line_limit": 1024}) as (emulator, driver):
        result = await carry_out(driver, pairs)
        assert not result.done
        assert "line longer than 1024" in result.items[0].detail


async def test_failed_second_line_leaves_first_in_place() -> None:
    pairs = pairs_of("polatis", 16, 16)
    async with emulated("polatis", line_limit=60) as (emulator, driver):
        diff = await driver.plan(CircuitChange(pairs))
        emulator.device.inject(DeviceFault(DeviceFaultKind.FAIL_PORT, 16))
        result = await driver.commit(diff, diff.revision)
        assert 0 < sum(item.done for item in result.items) < 16
        assert "PORT 16 FAILED" in result.items[-1].detail
        assert (await driver.rollback(diff)).done


@pytest.mark.parametrize("boot", [BootBehaviour.DARK, BootBehaviour.RESTORE])
async def test_polatis_reports_boot_behaviour(boot: BootBehaviour) -> None:
    async with emulated("polatis", DevicePanel(4, 4, reconfiguration_s=0.001, boot=boot)) as (emulator, driver):
        assert (await driver.facts()).boot is boot
        await carry_out(driver, (CrossConnect(1, 5),))
        emulator.device.inject(DeviceFault(DeviceFaultKind.RESTART))
        assert bool((await driver.cross_connects()).circuits) is (boot is BootBehaviour.RESTORE)


async def test_second_session_is_retryable_with_single_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ocs_drivers.tl1_wire.LOGIN_PAUSE_S", 0.002)
    async with emulated("polatis", quirks={"single_session": True}) as (_, driver):
        await driver.facts()
        access = driver._wire
        other = Tl1Switch("ocs1", address=f"{access.host}:{access.port}")
        with pytest.raises(DriverRetryable, match="allows no more sessions"):
            await other.facts()
        await driver.close()
        assert (await other.facts()).ports == 32  # free again
        await other.close()


async def test_refused_login_as_already_active_is_accepted() -> None:
    async with emulated("glimmerglass", quirks={"logged_in_already": True}) as (_, driver):
        assert (await carry_out(driver, (CrossConnect(1, 2),))).done


async def test_prompt_is_awaited_before_login() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for piece in (b"\xff\xfb\x01Welcome\r\n", b"age", b"nt> "):
            assert not reader._buffer
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        assert (await reader.readuntil(b";")).lstrip(b"\xff\xfe\x01").startswith(b"ACT-USER::root:1::root;")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    driver = Tl1Switch("ocs1", address=f"{host}:{port}", dialect="calient", prompt="agent>", command_timeout_s=60.0)
    with pytest.raises(DriverRetryable, match="the connection failed"):
        await driver.facts()
    await driver.close()
    server.close()


async def test_default_port_and_prompt_follow_dialect_and_address() -> None:
    access = [
        Tl1Switch("ocs1", address=address, dialect=dialect)._wire
        for address, dialect in (
            ("192.0.2.7", "polatis"),
            ("192.0.2.7", "calient"),
            ("192.0.2.7:3083", "calient"),
            ("[2001:db8::7]", "glimmerglass"),
        )
    ]
    assert [(each.host, each.port, each.prompt) for each in access] == [
        ("192.0.2.7", 3082, ""),
        ("192.0.2.7", 3082, ""),
        ("192.0.2.7", 3083, "agent>"),
        ("2001:db8::7", 10034, ""),
    ]


def test_invalid_options_are_all_reported() -> None:
    with pytest.raises(InvalidOptions) as refused:
        Tl1Switch(
            "ocs1",
            address="no/address",
            user="",
            dialect="ciena",
            group="LAB",
            messages="loud",
            line_limit=-1,
            command_timeout_s=0,
        )
    assert sorted(fault.partition(":")[0] for fault in refused.value.faults) == [
        "options.address",
        "options.command_timeout_s",
        "options.dialect",
        "options.group",
        "options.line_limit",
        "options.messages",
        "options.user",
    ]
    with pytest.raises(InvalidOptions, match="must not name a port twice"):
        Tl1Switch("ocs1", address="192.0.2.7", dialect="calient", port_names=["1.1.1", "1.1.1"])


def test_invalid_quirks_are_all_reported() -> None:
    with pytest.raises(InvalidOptions) as refused:
        make_emulator("tl1-polatis", FAST, echoes=True, echo=1, part_mark="|")
    assert len(refused.value.faults) == 3
    assert any(fault.startswith("echoes: is not known (known: acknowledge, echo") for fault in refused.value.faults)


def test_timeouts_are_taken_from_options() -> None:
    driver = Tl1Switch("ocs1", address="192.0.2.7", command_timeout_s=1.5, lock_timeout_s=2, link_timeout_s=3)
    assert driver._limits == DriverTimeouts(1.5, 2, None, 3)
