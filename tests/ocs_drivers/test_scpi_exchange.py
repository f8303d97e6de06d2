"""SCPI exchanges line by line: the documented ones, with the emulator and with the driver, and invalid answers."""

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from ocs_drivers.conformance import carry_out, connected, refusal
from ocs_drivers.emulators.base import DevicePanel
from ocs_drivers.emulators.scpi import ScpiEmulator, dicon, polatis
from ocs_drivers.errors import DriverOutcomeUnknown, DriverPermanent, DriverRetryable
from ocs_drivers.model import Action, ChangeMode, CircuitChange, CircuitState, CrossConnect, DeviceCircuit, PortStatus
from ocs_drivers.registry import make_driver
from ocs_drivers.scpi import ScpiSwitch, ScpiWire
from orchestrrl.core.clock import VirtualClock

PROTOCOLS = Path(__file__).parents[3] / "shared" / "reference" / "ocs-protocols.md"

IDENTITY = "Polatis,I-OST-24x24-LU1-DMHNS,002414,6.5.2.18"
ONE = CrossConnect(1, 17)

# Documented commands with their answers, on a switch with 16 and 16 ports; None: no answer. Each part begins in the
# state in which the previous one ended.
DOCUMENTED: list[tuple[str, str | None]] = [
    (":oxc:swit:size?", "16,16"),
    (":oxc:swit:conn:stat?", "(@),(@)"),
    (":oxc:swit:conn:add (@1,2,3),(@17,18,19)", None),
    (":oxc:swit:conn:port? 2", '"18"'),
    (":oxc:swit:conn:sub (@1),(@17)", None),
    (":oxc:swit:conn:stat?", "(@2,3),(@18,19)"),
    (":oxc:swit:conn:sub (@1,2,3),(@)", None),
    (":oxc:swit:conn:only (@1),(@17); stat?", "(@1),(@17)"),
    (":oxc:swit:conn:add (@1,2,3),(@19,18,22)", None),
    (":oxc:swit:conn:stat?", "(@1,2,3),(@19,18,22)"),
    (":oxc:swit:port:dis (@2,4,6)", None),
    (":oxc:swit:port:stat? (@2,4,6)", "(D,D,D)"),
    (":oxc:swit:port:enab (@4)", None),
    (":oxc:swit:port:stat? (@2,4,6)", "(D,E,D)"),
    (":oxc:swit:disc:all", None),
    (":oxc:swit:conn:stat?", "(@),(@)"),
    (":syst:err?", '0,"No error"'),
    (":syst:err:all?", '0,"No error"'),
    ("*cls", None),
    ("*opc?", "1"),
    ("*stb?", "0"),
]


class Client:
    """A plain TCP client."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.peer = writer.get_extra_info("peername")

    async def say(self, *lines: str, end: str = "\n") -> None:
        self._writer.write("".join(line + end for line in lines).encode())
        await self._writer.drain()

    async def hear(self) -> str:
        """Return the next line with its end; "" if the connection is closed."""
        return (await self._reader.readline()).decode()

    def hang_up(self) -> None:
        self._writer.close()


@asynccontextmanager
async def client_of(emulator: ScpiEmulator) -> AsyncIterator[Client]:
    host, port = (await emulator.start()).split(":")
    client = Client(*await asyncio.open_connection(host, int(port)))
    yield client
    client.hang_up()
    await emulator.stop()


# The emulator, driven with the documented commands.


async def test_emulator_answers_as_documented() -> None:
    async with client_of(polatis(DevicePanel(16, 16, reconfiguration_s=0.0))) as client:
        for command, answer in DOCUMENTED:
            await client.say(command)
            if answer is not None:
                assert await client.hear() == f"{answer}\n", command


@pytest.mark.shared
def test_documented_lines_match_reference() -> None:
    if not PROTOCOLS.exists():
        pytest.skip(f"{PROTOCOLS} does not exist")
    page = PROTOCOLS.read_text()
    assert IDENTITY in page
    for line in (
        ":oxc:swit:conn:add (@1,2,3),(@17,18,19)",
        ":oxc:swit:conn:sub (@1),(@17)",
        ":oxc:swit:conn:stat?",
        ":oxc:swit:port:stat? (@2,4,6)",
        ":oxc:swit:conn:only (@1),(@17); stat?",
        "(@1,2,3),(@19,18,22)",
        "(@),(@)",
        "(D,E,F)",
        "SYSTem:ERRor?",
    ):
        assert f"`{line}`" in page, line


async def test_emulator_accepts_scpi_header_forms() -> None:
    """Check both forms, any case, and headers relative to the previous one. Another header is an error and ends the
    line."""
    async with client_of(polatis(DevicePanel(4, 4, reconfiguration_s=0.0))) as client:
        await client.say(
            "*IDN?",
            ":OXC:SWITch:SIZE?",
            "oxc:Switch:conn:ADD (@ 1, 2),( @5,6)",
            ":oxc:swit:connect:state?;PORT? 1;:syst:error?;*opc?",
            ":oxc:swi:size?; *opc?",
            ":oxc:swit:siz?",
            "   ",
            ":syst:err:next?;all?",
            end="\r\n",
        )
        assert await client.hear() == "Polatis,I-OST-4x4-LU1-DMHNS,002414,6.5.2.18\n"
        assert await client.hear() == "4,4\n"
        # `( @5,6)` is not a list.
        assert await client.hear() == '(@),(@);"";-109,"Missing parameter";1\n'
        assert await client.hear() == '-113,"Undefined header;oxc:swi:size?";-113,"Undefined header;oxc:swit:siz?"\n'


async def test_dicon_error_queue_holds_8() -> None:
    async with client_of(dicon(DevicePanel(4, 4))) as client:
        await client.say(*["nonsense"] * 12, *["SYSTem:ERRor?"] * 9)
        errors = [await client.hear() for _ in range(9)]
        assert errors[:7] == ['-113,"Undefined header;nonsense"\r\n'] * 7
        assert errors[7:] == ['-350,"Queue overflow"\r\n', '0,"No error"\r\n']


@pytest.mark.parametrize(
    ("command", "error"),
    [
        (":oxc:swit:conn:add (@5),(@1)", '-222,"Data out of range;5"'),
        (":oxc:swit:conn:add (@1,2),(@5)", '-220,"Parameter error;lists of different ports, equally long"'),
        (":oxc:swit:conn:add (@1,1),(@5,6)", '-220,"Parameter error;lists of different ports, equally long"'),
        (":oxc:swit:conn:add (@1)", '-109,"Missing parameter"'),
        (":oxc:swit:conn:add (@x),(@5)", '-104,"Data type error"'),
        (":oxc:swit:conn:port? 9", '-222,"Data out of range;9"'),
        (":oxc:swit:port:dis 1", '-102,"Syntax error;a list of ports is (@1,2,3)"'),
        (":oxc:swit:port:stat? (@0)", '-222,"Data out of range;0"'),
    ],
)
async def test_invalid_command_has_no_effect_and_queues_error(command: str, error: str) -> None:
    async with client_of(polatis(DevicePanel(4, 4, reconfiguration_s=0.0))) as client:
        await client.say(command, ":syst:err?", ":oxc:swit:conn:stat?")
        assert await client.hear() == f"{error}\n"
        assert await client.hear() == "(@),(@)\n"


async def test_second_session_is_refused_until_first_ends() -> None:
    async with client_of(polatis(DevicePanel(4, 4), one_session=True)) as client:
        await client.say("*opc?")
        assert await client.hear() == "1\n"
        address = client.peer
        second = Client(*await asyncio.open_connection(*address))
        assert await second.hear() == ""
        client.hang_up()
        third = Client(*await asyncio.open_connection(*address))
        await third.say("*opc?")
        assert await third.hear() == "1\n"
        third.hang_up()


async def test_answers_to_one_line_can_be_separate_lines() -> None:
    async with client_of(polatis(DevicePanel(4, 4), answers_apart=True, crlf=True)) as client:
        await client.say(":oxc:swit:size?;*opc?")
        assert [await client.hear(), await client.hear()] == ["4,4\r\n", "1\r\n"]


# The driver, against a scripted device.


class Peer:
    """A scripted server. Each item of the script is an expected line and the bytes to send back. A line that differs
    from the script ends the connection and is recorded."""

    def __init__(self, script: Sequence[tuple[str, bytes]], piece_bytes: int = 0) -> None:
        self.script = list(script)
        self.unexpected: list[bytes] = []
        self.sessions = 0
        self._piece_bytes = piece_bytes
        self._writer: asyncio.StreamWriter | None = None

    def hang_up(self) -> None:
        assert self._writer is not None
        self._writer.close()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.sessions += 1
        self._writer = writer
        while line := await reader.readline():
            if not self.script or line.decode() != self.script[0][0] + "\n":
                self.unexpected.append(line)
                break
            answer = self.script.pop(0)[1]
            step = self._piece_bytes or max(1, len(answer))
            for start in range(0, len(answer), step):
                writer.write(answer[start : start + step])
                await asyncio.sleep(0)
        writer.close()


@asynccontextmanager
async def driver_of(peer: Peer, **options: Any) -> AsyncIterator[ScpiSwitch]:
    server = await asyncio.start_server(peer.serve, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    driver = ScpiSwitch("ocs1", **{"address": address, "reconfiguration_s": 0.0, **options})
    yield driver
    await driver.close()
    server.close()
    assert peer.unexpected == []


@asynccontextmanager
async def wire_to(peer: Peer, **options: Any) -> AsyncIterator[ScpiWire]:
    """Open a session, and yield the wire without the driver."""
    async with driver_of(peer, **options) as driver:
        wire = driver._wire
        assert isinstance(wire, ScpiWire)
        await wire.open()
        yield wire
        await wire.close()


NO_ERROR = b'0,"No error"\n'


def commanded(line: str, *errors: bytes) -> list[tuple[str, bytes]]:
    """Return the exchange of a setter, which has no answer, and of its errors."""
    return [("*cls", b""), (line, b""), *((":syst:err?", error) for error in (*errors, NO_ERROR))]


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("piece_bytes", [0, 1])
async def test_driver_sends_documented_lines(end: bytes, piece_bytes: int) -> None:
    every = ",".join(str(port) for port in range(1, 7))
    script = [
        ("*idn?", f"{IDENTITY}\n".encode()),
        (":oxc:swit:size?", b"3,3\n"),
        (":oxc:swit:size?", b"3,3\n"),
        (f":oxc:swit:port:stat? (@{every})", b"(D,E,F,E,E,E)\n"),
        (":oxc:swit:conn:stat?", b"(@),(@)\n"),
        *commanded(":oxc:swit:conn:add (@1,2,3),(@6,5,4)"),
        (":oxc:swit:conn:stat?", b"(@1,2,3),(@6,5,4)\n"),
        (f":oxc:swit:port:stat? (@{every})", b"(E,E,F,E,E,E)\n"),
        *commanded(":oxc:swit:conn:sub (@1),(@6)"),
    ]
    peer = Peer([(line, answer.replace(b"\n", end)) for line, answer in script], piece_bytes)
    pairs = [CrossConnect(1, 6), CrossConnect(2, 5), CrossConnect(3, 4)]
    async with wire_to(peer) as wire:
        facts = await wire.read_facts()
        assert (facts.vendor, facts.model) == ("Polatis", "I-OST-24x24-LU1-DMHNS")
        assert (facts.serial, facts.software) == ("002414", "6.5.2.18")
        assert (facts.ingress_ports, facts.egress_ports) == (range(1, 4), range(4, 7))
        states = [PortStatus.DISABLED, PortStatus.ENABLED, PortStatus.FAILED, *[PortStatus.ENABLED] * 3]
        assert [state.status for state in await wire.read_ports()] == states
        assert await wire.read_circuits() == []
        await wire.set(Action.ADD, pairs)
        circuits = [*(DeviceCircuit(pair) for pair in pairs[:2]), DeviceCircuit(pairs[2], CircuitState.FAILED)]
        assert await wire.read_circuits() == circuits
        await wire.set(Action.REMOVE, pairs[:1])
    assert peer.script == []


async def test_options_replace_unreported_facts() -> None:
    peer = Peer([("*idn?", b"DiCon,MXS,1,2,3\n"), (":oxc:swit:conn:stat?", b"(@5),(@9)\n")])
    options = {"profile": "dicon", "ingress_ports": "5..8", "egress_ports": "9..12", "port_states": False}
    async with driver_of(peer, **options, boot="dark") as driver:
        facts = await driver.facts()
        assert (facts.ingress_ports, facts.egress_ports) == (range(5, 9), range(9, 13))
        assert (facts.software, facts.boot) == ("2,3", "dark")
        assert [(state.port, state.status) for state in await driver.ports()] == [
            (port, PortStatus.ENABLED) for port in range(5, 13)
        ]
        assert await connected(driver) == {CrossConnect(5, 9)}
    assert peer.script == []


async def test_listed_connection_is_tuning_until_stated_time() -> None:
    clock = VirtualClock()
    listed = [(":oxc:swit:conn:stat?", b"(@1),(@17)\n"), (":oxc:swit:port:stat? (@1,17)", b"(E,E)\n")]
    peer = Peer([*commanded(":oxc:swit:conn:add (@1),(@17)"), *listed, *listed])
    async with wire_to(peer, clock=clock, reconfiguration_s=0.025) as wire:
        await wire.set(Action.ADD, [ONE])
        await clock.advance(0.024)
        assert await wire.read_circuits() == [DeviceCircuit(ONE, CircuitState.TUNING)]
        await clock.advance(0.001)
        assert await wire.read_circuits() == [DeviceCircuit(ONE, CircuitState.TUNED)]


async def test_errors_have_device_messages() -> None:
    errors = (b'-222,"Data out of range;99"\n', b'-200,"Mirror 3"\r\n', b'-350,"Queue overflow"\n')
    peer = Peer(commanded(":oxc:swit:conn:add (@1),(@17)", *errors))
    async with wire_to(peer) as wire:
        async with refusal(
            DriverPermanent, "-222 Data out of range;99; -200 Mirror 3; -350 Queue overflow", ":add (@1)"
        ):
            await wire.set(Action.ADD, [ONE])


@pytest.mark.parametrize(
    ("profile", "query", "queue"), [("polatis", ":syst:err?", 1024), ("dicon", ":SYSTem:ERRor?", 8)]
)
async def test_endless_error_queue_is_outcome_unknown(profile: str, query: str, queue: int) -> None:
    begin = [("*cls", b""), (":oxc:swit:conn:add (@1),(@17)", b"")]
    peer = Peer([*begin, *[(query, b'-310,"System error"\n')] * (queue + 2)])
    async with wire_to(peer, profile=profile) as wire:
        async with refusal(DriverOutcomeUnknown, "the error queue contains more than", "-310 System error"):
            await wire.set(Action.ADD, [ONE])
    assert len(peer.script) <= 1


async def test_unknown_query_reports_reason_from_error_queue() -> None:
    """Check that the reason is read from the error queue, because SCPI leaves an unknown query unanswered."""
    clock = VirtualClock()
    emulator = polatis(DevicePanel(4, 4), unknown=["OXC:SWITch:PORT:STATe?"])
    address = await emulator.start()
    driver = ScpiSwitch("ocs1", address=address, clock=clock)
    ports = asyncio.ensure_future(driver.ports())
    while not emulator.errors:
        await asyncio.sleep(0.001)
    await clock.advance(2.5)
    async with refusal(DriverPermanent, "ocs1", ":oxc:swit:port:stat? (@1,2", "-113 Undefined header"):
        await ports
    await driver.close()
    told = ScpiSwitch("ocs1", address=address, clock=clock, port_states=False)
    assert [state.port for state in await told.ports()] == list(range(1, 9))
    await told.close()
    await emulator.stop()


async def test_silent_device_is_retryable_after_time_limit() -> None:
    clock = VirtualClock()
    peer = Peer([("*idn?", b""), (":syst:err?", b""), ("*idn?", b""), (":syst:err?", b"")])
    async with driver_of(peer, clock=clock) as driver:
        facts = asyncio.ensure_future(driver.facts())
        for left in (3, 2, 1, 0):
            while len(peer.script) > left:
                await asyncio.sleep(0.001)
            await clock.advance(2.6)
        async with refusal(DriverRetryable, "ocs1", "the device did not respond within 5 s"):
            await facts
    assert peer.sessions == 2


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        (b"Welcome\n", DriverPermanent, ("vendor,model,serial,software", "Welcome")),
        (b"\n", DriverPermanent, ("vendor,model,serial,software",)),
        (b"\xff\xfb\x01\n", DriverRetryable, ("not ASCII text", "\\xff\\xfb\\x01")),
        (b"Polatis,half a li", DriverRetryable, ("closed the connection", "Polatis,half a li")),
        (b"x" * ((1 << 20) + 70_000), DriverRetryable, ("longer than 1048576 bytes", "xxx")),
    ],
    ids=["words", "nothing", "bytes", "broken off", "endless"],
)
async def test_invalid_answer_raises_driver_error(
    answer: bytes, kind: type[DriverPermanent | DriverRetryable], words: tuple[str, ...]
) -> None:
    class Rude(Peer):
        async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.sessions += 1
            await reader.readline()
            writer.write(answer)
            if not answer.endswith(b"\n"):
                writer.close()

    peer = Rude([])
    async with driver_of(peer) as driver:
        async with refusal(kind, "ocs1", *words):
            await driver.facts()
        async with refusal(kind):
            await driver.facts()
    # No further query is sent in a session that is out of step.
    assert peer.sessions == (2 if kind is DriverPermanent else 4)


@pytest.mark.parametrize(
    ("question", "answer", "words"),
    [
        (":oxc:swit:size?", b"16,16,16\n", "two numbers >= 1"),
        (":oxc:swit:size?", b"16,0\n", "two numbers >= 1"),
        (":oxc:swit:size?", b"-113,'?'\n", "a number must have 1 to 5 digits"),
        (":oxc:swit:conn:stat?", b"(@1,2),(@17)\n", "must have equal lengths"),
        (":oxc:swit:conn:stat?", b"(@1,1),(@17,18)\n", "listed twice"),
        (":oxc:swit:conn:stat?", b"(@1:99999,1:99999),(@1)\n", "at most 99999 ports"),
        (":oxc:swit:conn:stat?", b"(@1,),(@17,18)\n", "a number must have 1 to 5 digits"),
    ],
)
async def test_invalid_lists_are_refused(question: str, answer: bytes, words: str) -> None:
    async with wire_to(Peer([(question, answer)])) as wire:
        async with refusal(DriverPermanent, words, question):
            await (wire.read_circuits() if "conn" in question else wire.read_ports())
        async with refusal(DriverRetryable, "closed"):
            await wire.read_circuits()


@pytest.mark.parametrize("letters", [b"(E)\n", b"(E,E,E)\n", b"(E,X)\n", b"E,E\n", b"()\n"])
async def test_port_states_of_wrong_length_are_refused(letters: bytes) -> None:
    script = [(":oxc:swit:size?", b"1,1\n"), (":oxc:swit:port:stat? (@1,2)", letters)]
    async with wire_to(Peer(script)) as wire:
        async with refusal(DriverPermanent, "port:stat? (@1,2)"):
            await wire.read_ports()


async def test_setter_with_unreadable_errors_is_outcome_unknown() -> None:
    for answer in (b"garbage\n", b"\xff\n", b'0,"No er'):
        script = [("*cls", b""), (":oxc:swit:conn:sub (@1),(@17)", b""), (":syst:err?", answer)]
        peer = Peer([*script, ("the end of the session", b"")])
        async with wire_to(peer) as wire:
            remove = asyncio.ensure_future(wire.set(Action.REMOVE, [ONE]))
            if not answer.endswith(b"\n"):
                while len(peer.script) > 1:
                    await asyncio.sleep(0)
                peer.hang_up()
            async with refusal(DriverOutcomeUnknown, "conn:sub (@1),(@17)"):
                await remove


async def test_wire_refuses_empty_list() -> None:
    peer = Peer([])
    async with wire_to(peer) as wire:
        for action in Action:
            with pytest.raises(ValueError, match="must not be empty"):
                await wire.set(action, [])


async def test_unreachable_switch_is_retryable() -> None:
    driver = make_driver("scpi", "ocs1", {"address": "127.0.0.1:1"})
    async with refusal(DriverRetryable, "ocs1", "127.0.0.1:1"):
        await driver.facts()
    await driver.close()


async def test_no_change_sends_clearing_commands() -> None:
    """Check that `only`, `disc:all` and empty lists are never sent, even if every circuit is removed."""
    emulator = polatis(DevicePanel(4, 4, reconfiguration_s=0.0))
    driver = make_driver("scpi", "ocs1", {"address": await emulator.start(), "reconfiguration_s": 0.0})
    pairs = tuple(CrossConnect(port, port + 4) for port in range(1, 5))
    await carry_out(driver, pairs)
    diff = await driver.plan(CircuitChange(pairs[:1]), ChangeMode.OVERWRITE)
    assert (await driver.commit(diff, diff.revision)).done
    assert (await driver.rollback(diff)).done
    await carry_out(driver, disconnect=pairs)
    assert await connected(driver) == frozenset()
    assert len(emulator.device.setters) == 4
    assert all(
        re.fullmatch(r":oxc:swit:conn:(add|sub) [(]@[0-9,]+[)],[(]@[0-9,]+[)]", s) for s in emulator.device.setters
    )
    await driver.close()
    await emulator.stop()
