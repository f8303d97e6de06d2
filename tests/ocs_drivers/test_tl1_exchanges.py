"""TL1 exchanges word for word: the driver's commands and its reading of documented answers, and the emulators' answers
to an independent client."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from ocs_drivers.emulators.base import DevicePanel
from ocs_drivers.emulators.registry import make_emulator
from ocs_drivers.errors import DriverError, DriverOutcomeUnknown, DriverPermanent, DriverRetryable
from ocs_drivers.model import Action, BootBehaviour, CircuitState, CrossConnect, DeviceCircuit, PortStatus
from ocs_drivers.tl1 import Tl1Switch
from ocs_drivers.tl1_session import Tl1Session, ctags

REFERENCE = Path(__file__).parents[2].parent / "shared" / "reference" / "ocs-protocols.md"

# Documented commands, and the answers of an emulator with 16 ports on each side.
POLATIS = (
    ("ACT-USER::root:1::root;", "M  1 COMPLD"),
    ("ENT-PATCH::11,28:2:;", "M  2 COMPLD"),
    ("ENT-PATCH::1&2&3,17&18&19:3:;", "M  3 COMPLD"),
    ("RTRV-PATCH:::4:;", '   "1,17"\r\n   "2,18"\r\n   "3,19"\r\n   "11,28"\r\n;'),
    ("ENT-PATCH::1&&4,17&&20:5:;", "M  5 COMPLD"),
    ("RTRV-PATCH::11&4&10:6:;", 'M  6 COMPLD\r\n   "4,20"\r\n   "11,28"\r\n;'),
    ("DLT-PATCH::11:7:;", "M  7 COMPLD"),
    ("RTRV-PATCH::11&4&10:8:;", 'M  8 COMPLD\r\n   "4,20"\r\n;'),
    ("OPR-PORT-SHUTTER::5:9:;", "M  9 COMPLD"),
    ("RTRV-PORT-SHUTTER::5&6:10:;", '   "5:CLOSED"\r\n   "6:OPEN"'),
    ("RLS-PORT-SHUTTER::5:11:;", "M  11 COMPLD"),
    ("RTRV-NETYPE:::12:;", '"Polatis,OST,OCS,6.5.2.18"'),
    ("RTRV-EQPT::SYSTEM:13:::PARAMETER=SIZE;", '"SYSTEM:SIZE=16x16"'),
    ("DLT-PATCH::ALL:14:;", "M  14 COMPLD"),
    ("RTRV-PATCH:::15:;", "M  15 COMPLD\r\n;"),
    ("ENT-PATCH::1,99:16:;", "M  16 DENY\r\n   IIAC\r\n   /* "),
    ("NONSENSE::1:17:;", "M  17 DENY\r\n   ICNV\r\n"),
    ("CANC-USER::root:18:;", "M  18 COMPLD"),
    ("RTRV-PATCH:::19:;", "M  19 DENY\r\n   PLNA\r\n"),
)
CALIENT = (
    ("ACT-USER::root:1::root;", "M  1 COMPLD"),
    ("RTRV-NE;", "M  0 COMPLD"),
    ("ENT-CRS::1.1.1,1.2.2:2::Quali,1WAY;", "M  2 COMPLD"),
    ("RTRV-CRS:::::ALL;", "GRPNAME=Quali,CONNNAME=1.1.1>1.2.2,CONNTYPE=1WAY,AS=UMA,OS=RDY,OC=OK"),
    ("ACT-CRS::1.1.1,1.2.2:3::1.1.1>1.2.2,Quali;", "M  3 COMPLD"),
    ("RTRV-CRS:::::ALL;", '   "1.1.1>1.2.2:SRCPORT=1.1.1,DSTPORT=1.2.2,GRPNAME=Quali,CONNNAME=1.1.1>1.2.2,'),
    ("RTRV-PORT-SUM::1.1.1;", "CONNNAME1=1.1.1>1.2.2,CONNSTATE1=ACT,"),
    ("ENT-CRS::1.1.1,1.2.3:4::Quali,1WAY;", "M  4 DENY"),
    ("CANC-CRS:::::1.1.1>1.2.2;", "M  0 COMPLD"),
    ("DLT-CRS::1.1.1,1.2.2:5::,Quali,1.1.1>1.2.2;", "M  5 COMPLD"),
    ("INH-MSG;", "M  0 COMPLD"),
    ("RTRV-CRS:::::ALL;", "M  0 COMPLD\r\n;"),
)
GLIMMERGLASS = (
    ("act-user::root:1::root;", "M  1 COMPLD"),
    ("ent-crs-fiber::10001&10002,20002&20001:2;", "M  2 COMPLD"),
    ("rtrv-crs-fiber::10001:3;", '"GGN:IPORTID=10001,IPORTNAME=,OPORTID=20002,OPORTNAME=,CONNID=0,CONNSTATE='),
    ("dlt-crs-fiber::10001:4;", "M  4 COMPLD"),
    ("rtrv-crs-fiber::all:5;", '"GGN:IPORTID=10001,IPORTNAME=,OPORTID=0,OPORTNAME=,CONNID=0,CONNSTATE=single,'),
    ("ent-crs-fiber::20001,10001:6;", "M  6 DENY"),
)
TABLES = {"tl1-polatis": POLATIS, "tl1-calient": CALIENT, "tl1-glimmerglass": GLIMMERGLASS}


def talk(address: str, commands: bytes, ends: int) -> str:
    """Send all commands at once, as `nc` does, and read until `ends` messages have ended."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(commands)
        received = b""
        while received.count(b"\r\n;") < ends:
            piece = connection.recv(65536)
            if not piece:
                break
            received += piece
        return received.decode("latin-1")


@pytest.mark.parametrize("protocol", TABLES)
async def test_emulator_answers_documented_commands(protocol: str) -> None:
    emulator = make_emulator(protocol, DevicePanel(16, 16, reconfiguration_s=0.0))
    address = await emulator.start()
    try:
        table = TABLES[protocol]
        # Disable reports, which would be inserted between replies.
        quiet = "" if protocol == "tl1-polatis" else table[0][0] + "INH-MSG;" * (protocol == "tl1-calient")
        sent = quiet + "\n".join(command for command, _ in table)
        answer = await asyncio.to_thread(talk, address, sent.encode(), len(table) + quiet.count(";"))
        for command, wanted in table:
            assert wanted in answer, f"{command}: {wanted!r} is not in {answer!r}"
    finally:
        await emulator.stop()


@pytest.mark.shared
def test_documented_commands_match_reference() -> None:
    if not REFERENCE.exists():
        pytest.skip("the reference material is missing")
    documented = REFERENCE.read_text()
    for command in (
        "ENT-PATCH::11,28:<ctag>:;",
        "ENT-PATCH::1&2&3,17&18&19:<ctag>:;",
        "ENT-PATCH::1&&4,17&&20:<ctag>:;",
        "DLT-PATCH::11:<ctag>:;",
        "RTRV-PATCH::11&4&10:<ctag>:;",
        "RTRV-EQPT::SYSTEM:<ctag>:::PARAMETER=SIZE;",
        "ENT-CRS::<src>,<dst>:<ctag>::<group>,1WAY|2WAY;",
        "ACT-CRS::<src>,<dst>:<ctag>::<src>><dst>|<src>-<dst>,<group>;",
        "RTRV-CRS:::::ALL;",
        "ent-crs-fiber::10001&10002,20002&20001:<ctag>;",
        "dlt-crs-fiber::<in>:<ctag>;",
        "rtrv-crs-fiber::all:<ctag>;",
    ):
        assert command in documented


class Script:
    """A scripted device. It answers by the beginning of the command and records the commands. An answer of None closes
    the connection, one that begins with `!` is sent unchanged, `DENY ...` is a refusal."""

    def __init__(self, answers: dict[str, str | None]) -> None:
        self.answers = answers
        self.received: list[str] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                command = (await reader.readuntil(b";\r\n")).decode().strip()
                self.received.append(command)
                ctag = command.rstrip(";").split(":")[3]
                answer = next((a for key, a in self.answers.items() if command.startswith(key)), "")
                if answer is None:
                    break
                writer.write(self._framed(answer, ctag).encode("latin-1"))
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            writer.close()

    def _framed(self, answer: str, ctag: str) -> str:
        if answer.startswith("!"):
            return answer[1:].replace("<ctag>", ctag)
        head = f"\r\n\n   SWITCH 16-11-07 11:20:14\r\nM  {ctag} "
        if answer.startswith("DENY"):
            return f"{head}DENY\r\n   {answer[5:9]}\r\n   /* {answer[10:]} */\r\n;"
        return f"{head}COMPLD\r\n" + "".join(f"   {line}\r\n" for line in answer.splitlines()) + ";"

    def asked(self) -> list[str]:
        """Return the commands sent, without CTAGs and login."""
        return [":".join(["*" if i == 3 else part for i, part in enumerate(c.split(":"))]) for c in self.received[1:]]


@asynccontextmanager
async def scripted(answers: dict[str, str | None], **options: Any) -> AsyncIterator[tuple[Script, Tl1Switch]]:
    script = Script(answers)
    server = await asyncio.start_server(script.serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    driver = Tl1Switch("ocs1", address=f"{host}:{port}", command_timeout_s=60.0, **options)
    try:
        yield script, driver
    finally:
        await driver.close()
        server.close()


POLATIS_SAYS: dict[str, str | None] = {
    "RTRV-EQPT::SYSTEM": '"SYSTEM:SIZE=16x16"',
    "RTRV-EQPT::BOOT": '"BOOT:MODE=RESTORE"',
    "RTRV-NETYPE": '"Polatis,I-OST-16x16-LU1-DMHNS,OCS,6.5.2.18"',
    "RTRV-INV": '"OCS:SN=002414"',
    "RTRV-PATCH": '"11,28"\n"17,1"',
    "RTRV-PORT-SHUTTER": '"1:OPEN"\n"2:CLOSED"\n"3:FAULTY"',
}


async def test_polatis_exchange_matches_documentation() -> None:
    async with scripted(POLATIS_SAYS) as (script, driver):
        facts = await driver.facts()
        assert (facts.vendor, facts.model, facts.serial, facts.software) == (
            "Polatis",
            "I-OST-16x16-LU1-DMHNS",
            "002414",
            "6.5.2.18",
        )
        assert (facts.ingress_ports, facts.egress_ports, facts.boot) == (
            range(1, 17),
            range(17, 33),
            BootBehaviour.RESTORE,
        )
        seen = (await driver.cross_connects()).circuits
        assert seen == (
            DeviceCircuit(CrossConnect(1, 17)),
            DeviceCircuit(CrossConnect(11, 28)),
        )  # in either order of the ports
        assert [port.status for port in await driver.ports()] == [
            PortStatus.ENABLED,
            PortStatus.DISABLED,
            PortStatus.FAILED,
        ]
        wire = driver._wire
        await wire.set(Action.ADD, [CrossConnect(1, 17), CrossConnect(2, 18), CrossConnect(3, 19)])
        await wire.set(Action.REMOVE, [CrossConnect(11, 28)])
    assert script.asked() == [
        "RTRV-EQPT::SYSTEM:*:::PARAMETER=SIZE;",
        "RTRV-EQPT::BOOT:*:::PARAMETER=MODE;",
        "RTRV-NETYPE:::*:;",
        "RTRV-INV::OCS:*:;",
        "RTRV-PATCH:::*:;",
        "RTRV-PORT-SHUTTER::1&&32:*:;",
        "ENT-PATCH::1&2&3,17&18&19:*:;",
        "DLT-PATCH::11:*:;",
        "CANC-USER::root:*:;",
    ]
    ctags_sent = [command.rstrip(";").split(":")[3] for command in script.received]
    assert len(set(ctags_sent)) == len(ctags_sent)


async def test_any_to_any_polatis_without_boot_mode() -> None:
    answers = {**POLATIS_SAYS, "RTRV-EQPT::SYSTEM": '"SYSTEM:SIZE=32xCC"', "RTRV-EQPT::BOOT": "DENY IIAC no such"}
    async with scripted(answers, boot="dark") as (_, driver):
        facts = await driver.facts()
        assert (facts.ingress_ports, facts.egress_ports, facts.boot) == (
            range(1, 33),
            range(1, 33),
            BootBehaviour.DARK,
        )


CALIENT_SAYS: dict[str, str | None] = {
    "RTRV-NE": '"CALIENT01TS:SERIALNUMBER=C00002227,SWPACKAGE=6.0-3,STATUS=OK,CHASSISTYPE=S162,PLATFORM=VERSION2"',
    "RTRV-PORT-SUM": "\n".join(
        f'"{name}:ALIAS=\\"a; b\\",INPWR={power},OUTPWR=NONE,CONNNAME1=NONE,CONNSTATE1=NONE"'
        for name, power in (("2.10.1", "NONE"), ("2.2.1", "-12.5"), ("10.1.1", "-3"), ("2.2.2", "NONE"))
    ),
    "RTRV-PORT:": (
        '"2.2.1:WX,NONE,NONE:INAS=OOS-NP,INOS=OOS,INOC=OK,INRS=NPR,OUTAS=OOS-NP,OUTOS=OOS,OUTOC=OK,OUTRS=NPR"\n'
        '"2.2.2:WX,NONE,NONE:INAS=IS,INOS=IS,INOC=OK,INRS=NPR,OUTAS=IS,OUTOS=OOS,OUTOC=FAIL,OUTRS=NPR"\n'
        '"2.10.1:WX,NONE,NONE:INAS=OOS-MA,INOS=OOS,INOC=OK,INRS=NPR,OUTAS=IS,OUTOS=IS,OUTOC=OK,OUTRS=NPR"'
    ),
    "RTRV-CRS": (
        '"2.2.1-2.2.2:SRCPORT=2.2.1,DSTPORT=2.2.2,GRPNAME=DSTRAUB,CONNNAME=2.2.1-2.2.2,CONNTYPE=2WAY,AS=IS,OS=IS,OC=OK"\n'
        '"2.10.1>10.1.1:SRCPORT=2.10.1,DSTPORT=10.1.1,GRPNAME=LAB,CONNNAME=2.10.1>10.1.1,CONNTYPE=1WAY,AS=IS,OS=RDY,OC=OK"\n'
        '"10.1.1>2.10.1:SRCPORT=10.1.1,DSTPORT=2.10.1,GRPNAME=LAB,CONNNAME=\\"old; one\\",CONNTYPE=1WAY,'
        'AS=UMA,OS=RDY,OC=OK"'
    ),
}


async def test_calient_exchange_matches_documentation() -> None:
    async with scripted(CALIENT_SAYS, dialect="calient", group="LAB") as (script, driver):
        facts = await driver.facts()
        assert (facts.model, facts.serial, facts.software) == ("S162", "C00002227", "6.0-3")
        # Numbered in the natural order of their names: 2.2.1, 2.2.2, 2.10.1, 10.1.1.
        assert facts.ingress_ports == facts.egress_ports == range(1, 5)
        ports = await driver.ports()
        assert [port.status for port in ports[:3]] == [PortStatus.ENABLED, PortStatus.FAILED, PortStatus.DISABLED]
        assert [port.power_dbm for port in ports] == [-12.5, None, None, -3.0]
        assert (await driver.cross_connects()).circuits == (
            DeviceCircuit(CrossConnect(1, 2)),
            DeviceCircuit(CrossConnect(2, 1)),
            DeviceCircuit(CrossConnect(3, 4), CircuitState.TUNING),
        )
        wire = driver._wire
        del script.received[1:]
        with pytest.raises(DriverPermanent, match="one direction of the two-way connection"):
            await wire.set(Action.REMOVE, [CrossConnect(1, 2)])
        await wire.set(Action.REMOVE, [CrossConnect(3, 4)])
        await wire.set(Action.ADD, [CrossConnect(1, 4)])
        assert script.asked() == [
            "CANC-CRS:::*::2.10.1>10.1.1;",
            "DLT-CRS:::*::2.10.1>10.1.1;",
            "ENT-CRS::2.2.1,10.1.1:*::LAB,1WAY;",
            "ACT-CRS::2.2.1,10.1.1:*::2.2.1>10.1.1,LAB;",
        ]


async def test_calient_deletes_owned_provisioned_connection_in_the_way() -> None:
    async with scripted(
        {**CALIENT_SAYS, "ENT-CRS": "DENY SROF Invalid Connection"}, dialect="calient", group="LAB"
    ) as (
        script,
        driver,
    ):
        await driver.cross_connects()
        script.received.clear()
        with pytest.raises(DriverPermanent, match="Invalid Connection"):
            await driver._wire.set(Action.ADD, [CrossConnect(4, 3)])
        assert [command.split(":")[0] for command in script.received] == ["ENT-CRS", "RTRV-CRS", "DLT-CRS", "ENT-CRS"]
        assert script.received[2].endswith('::"old; one";')


async def test_calient_keeps_foreign_provisioned_connection() -> None:
    """Check that the default group, which all clients share, does not establish ownership."""
    says = {**CALIENT_SAYS, "ENT-CRS": "DENY SROF Invalid Connection"}
    says["RTRV-CRS"] = str(says["RTRV-CRS"]).replace("LAB", "SYSTEM")
    async with scripted(says, dialect="calient") as (script, driver):
        await driver.cross_connects()
        script.received.clear()
        with pytest.raises(DriverPermanent, match="Invalid Connection"):
            await driver._wire.set(Action.ADD, [CrossConnect(4, 3)])
        assert [command.split(":")[0] for command in script.received] == ["ENT-CRS", "RTRV-CRS"]


async def test_calient_refuses_changed_port_list() -> None:
    async with scripted(dict(CALIENT_SAYS), dialect="calient") as (script, driver):
        await driver.facts()
        await driver.close()
        script.answers["RTRV-PORT-SUM"] = str(CALIENT_SAYS["RTRV-PORT-SUM"]) + '\n"1.1.1:ALIAS=NONE"'
        with pytest.raises(DriverPermanent, match="list of ports has changed"):
            await driver.ports()


async def test_calient_port_names_fix_numbers() -> None:
    async with scripted(CALIENT_SAYS, dialect="calient", port_names=["10.1.1", "2.2.1"]) as (_, driver):
        assert (await driver.facts()).ingress_ports == range(1, 3)
        assert [port.power_dbm for port in await driver.ports()] == [-3.0, -12.5]
    async with scripted(CALIENT_SAYS, dialect="calient", port_names=["10.1.1", "7.7.7"]) as (_, driver):
        with pytest.raises(DriverPermanent, match=r"no ports 7\.7\.7"):
            await driver.facts()


GLIMMERGLASS_SAYS: dict[str, str | None] = {
    "rtrv-system-info": (
        '"GGN:SerialNumber=300-117"\n"GGN:SystemType=OXC"\n"GGN:ChassisType=System-300"\n'
        '"GGN:SoftwareActiveVersion=3.4.1"\n"GGN:LicensedPortMatrix=4x4"'
    ),
    "RTRV-CFG-FIBER": (
        '"GGN:PORTID=10001,PORTNAME=\\"from 5530; #4\\",PORTDIR=input,PORTHEALTH=good,PORTCAT=nor,PORTPRIV=0x1"\n'
        '"GGN:PORTID=10002,PORTNAME=,PORTDIR=input,PORTHEALTH=good,PORTCAT=nor,PORTPRIV=0x0"\n'
        '"GGN:PORTID=20001,PORTNAME=,PORTDIR=output,PORTHEALTH=bad,PORTCAT=nor,PORTPRIV=0x1"'
    ),
    "rtrv-port-power": (
        '"GGN:PORTID=10001,PORTNAME=,PORTPOWER=-49.162"\n"GGN:PORTID=10002,PORTNAME=,PORTPOWER=NONE"\n'
        '"GGN:PORTID=20002,PORTNAME=,PORTPOWER=-7.5"'
    ),
    "rtrv-crs-fiber": (
        '"GGN:IPORTID=10001,IPORTNAME=,OPORTID=0,OPORTNAME=,CONNID=0,CONNSTATE=single,CONNCAUSE=none,INPWR=-49.162"\n'
        '"GGN:IPORTID=10002,IPORTNAME=,OPORTID=20003,OPORTNAME=,CONNID=0,CONNSTATE=fault,'
        'CONNCAUSE=initial_connection_timer_expired,INPWR=-48.549,OUTPWR=-49.354"\n'
        '"GGN:IPORTID=10004,IPORTNAME=,OPORTID=20004,OPORTNAME=,CONNID=0,CONNSTATE=steady,CONNCAUSE=none"'
    ),
}


async def test_glimmerglass_exchange_matches_documentation() -> None:
    async with scripted(GLIMMERGLASS_SAYS, dialect="glimmerglass") as (script, driver):
        facts = await driver.facts()
        assert (facts.model, facts.serial, facts.software, facts.ports) == ("System-300", "300-117", "3.4.1", 4)
        ports = await driver.ports()
        assert [port.status for port in ports[:2]] == [PortStatus.FAILED, PortStatus.DISABLED]
        assert [port.power_dbm for port in ports[:3]] == [-49.162, -7.5, None]
        assert (await driver.cross_connects()).circuits == (
            DeviceCircuit(CrossConnect(2, 3), CircuitState.FAILED),
            DeviceCircuit(CrossConnect(4, 4)),
        )
        script.received.clear()
        await driver._wire.set(Action.ADD, [CrossConnect(1, 2), CrossConnect(2, 1)])
        await driver._wire.set(Action.REMOVE, [CrossConnect(1, 2)])
        assert script.received[0].startswith("ent-crs-fiber::10001&10002,20002&20001:")
        assert script.received[1].startswith("dlt-crs-fiber::10001:")


@pytest.mark.parametrize(
    "words", ["DENY SAIS Already logged in", "DENY PLNA User root is already logged on, logged in"]
)
async def test_already_logged_in_is_accepted(words: str) -> None:
    async with scripted({**POLATIS_SAYS, "ACT-USER": words}) as (_, driver):
        assert (await driver.facts()).ports == 32


async def test_wrong_password_is_permanent_and_not_shown() -> None:
    async with scripted({"ACT-USER": "DENY PICC wrong password"}, password="s3cr;et") as (script, driver):
        with pytest.raises(DriverPermanent, match="wrong password") as refused:
            await driver.facts()
        assert "s3cr" not in str(refused.value)
        assert refused.value.command == "ACT-USER::root"
        assert script.received[0].endswith('::"s3cr;et";')  # in quotes, so that the device does not stop there


@pytest.mark.parametrize(
    ("answer", "is_setter", "kind"),
    [
        ("!\r\n\nRL <ctag>\r\n<", True, DriverRetryable),
        ("!\r\n\nNG <ctag>\r\n<", True, DriverPermanent),
        ("!\r\n\nNA <ctag>\r\n<", True, DriverOutcomeUnknown),
        ("!\r\n\nNA <ctag>\r\n<", False, DriverRetryable),
        (None, True, DriverOutcomeUnknown),
        (None, False, DriverRetryable),
        ("DENY SROF no", True, DriverPermanent),
    ],
)
async def test_failed_commands_map_to_driver_errors(
    answer: str | None, is_setter: bool, kind: type[DriverError]
) -> None:
    async with scripted({**POLATIS_SAYS, "ENT-PATCH": answer, "RTRV-PORT-SHUTTER": answer}) as (_, driver):
        await driver.facts()
        with pytest.raises(kind) as told:
            await (driver._wire.set(Action.ADD, [CrossConnect(1, 17)]) if is_setter else driver._wire.read_ports())
        assert type(told.value).__mro__[:-1].count(kind) == 1
        assert told.value.command


async def test_in_progress_acknowledgement_is_awaited() -> None:
    reply = "!\r\n\nIP <ctag>\r\n<\r\n\n   OXC 26-11-22 02:30:00\r\nM  <ctag> COMPLD\r\n;"
    async with scripted({**POLATIS_SAYS, "ENT-PATCH": reply}) as (_, driver):
        await driver.facts()
        await driver._wire.set(Action.ADD, [CrossConnect(1, 17)])


async def test_late_reply_is_not_matched_to_next_command() -> None:
    """Send the reply to an abandoned command just before the reply to the next."""
    first_is_sent = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        late = (await reader.readuntil(b";")).decode().rstrip(";").split(":")[3]
        first_is_sent.set()
        ctag = (await reader.readuntil(b";")).decode().rstrip(";").split(":")[3]
        for tag, line in ((late, '"1,17"'), (ctag, '"2,18"')):
            writer.write(f"\r\n\n   OXC 26-11-22 02:30:00\r\nM  {tag} COMPLD\r\n   {line}\r\n;".encode())
        await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    session = Tl1Session(ctags(), lambda report: None, lambda: None)
    await session.open(host, port)
    abandoned = asyncio.create_task(session.execute("RTRV-PATCH:::<ctag>:;"))
    await first_is_sent.wait()
    abandoned.cancel()
    await asyncio.gather(abandoned, return_exceptions=True)
    assert (await session.execute("RTRV-PATCH:::<ctag>:;")).lines == ["2,18"]
    await session.close("")
    server.close()


@pytest.mark.parametrize("dialect", ["polatis", "calient", "glimmerglass"])
async def test_empty_list_is_never_sent(dialect: str) -> None:
    says = {"polatis": POLATIS_SAYS, "calient": CALIENT_SAYS, "glimmerglass": GLIMMERGLASS_SAYS}[dialect]
    async with scripted(says, dialect=dialect) as (script, driver):
        await driver.facts()
        before = len(script.received)
        for action in Action:
            with pytest.raises(ValueError, match=r"must not be empty|not enough values"):
                await driver._wire.set(action, [])
        assert len(script.received) == before
