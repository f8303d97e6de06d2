"""gNMI interoperability: documented rows, pygnmi's client against the emulators, TLS, and failures."""

import asyncio
import datetime
import ipaddress
import socket
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from hypothesis import given
from hypothesis import strategies as st
from pygnmi.client import gNMIclient, gNMIException
from pygnmi.create_gnmi_path import gnmi_path_generator

from ocs_drivers import gnmi_openconfig, gnmi_sonic
from ocs_drivers.base import OcsDriver
from ocs_drivers.conformance import carry_out, connected, refusal
from ocs_drivers.emulators.base import DevicePanel
from ocs_drivers.emulators.gnmi import GnmiEmulator, openconfig, sonic
from ocs_drivers.errors import CircuitConflict, DriverOutcomeUnknown, DriverPermanent, DriverRetryable, InvalidOptions
from ocs_drivers.faults import DeviceFault, DeviceFaultKind
from ocs_drivers.gnmi_data import Elem, path, path_from_pb, path_to_pb, shown, tree
from ocs_drivers.gnmi_openconfig import OpenConfigTopology
from ocs_drivers.gnmi_session import _translated
from ocs_drivers.gnmi_sonic import SonicPorts
from ocs_drivers.model import (
    CircuitChange,
    CircuitState,
    Connectivity,
    CrossConnect,
    DeviceCircuit,
    EventKind,
    PortStatus,
    SwitchEvent,
)
from ocs_drivers.registry import make_driver

FAST = DevicePanel(8, 8, reconfiguration_s=0.002)
ROW = "sonic-db:CONFIG_DB/localhost/OCS_CROSS_CONNECT/{}"
CONNECTION = "/optical-switch/port-connections/port-connection[slot=1][port={}]"


def driver_for(address: str, **options: Any) -> OcsDriver:
    return make_driver("gnmi", "ocs1", {"address": address, "tls": False, "command_timeout_s": 60.0, **options})


async def at(emulator: GnmiEmulator, use: Callable[[str], Awaitable[None]], host: str = "127.0.0.1") -> None:
    address = await emulator.start(host)
    try:
        await use(address)
    finally:
        await emulator.stop()


# Names and rows.


@given(st.integers(1, 1024), st.integers(1, 1024), st.data())
def test_port_names_are_bijective(a_ports: int, b_ports: int, data: st.DataObject) -> None:
    sides = SonicPorts(a_ports, b_ports)
    a, b = data.draw(st.integers(1, a_ports)), data.draw(st.integers(1, b_ports))
    pair = CrossConnect(a, a_ports + b)
    assert (sides.port(f"{a}A"), sides.port(f"{b}B")) == (pair.ingress_port, pair.egress_port)
    assert sides.key(pair) == f"{a}A-{b}B"
    assert sides.cross_connect(sides.key(pair)) == pair


@given(st.text(max_size=12) | st.from_regex(r"[0-9]{0,3}[ABab]?-?[0-9]{0,3}[ABab]?", fullmatch=True))
def test_malformed_cross_connect_is_refused(text: str) -> None:
    a, _, b = text.partition("-")
    is_one = (
        all(name[:-1].isdecimal() and name[:-1].isascii() and not name.startswith("0") for name in (a, b))
        and (a[-1:], b[-1:]) == ("A", "B")
        and all(1 <= int(name[:-1]) <= 64 for name in (a, b))
    )
    if is_one:
        assert SonicPorts(64, 64).key(SonicPorts(64, 64).cross_connect(text)) == text
        return
    with pytest.raises(ValueError, match="must"):
        SonicPorts(64, 64).cross_connect(text)


@pytest.mark.parametrize("names", [["1A", "2A"], ["1A", "3A", "1B"], ["1A", "1B", "1-1A"], ["01A", "1B"], []])
def test_ports_with_gaps_are_refused(names: list[str]) -> None:
    with pytest.raises(ValueError, match="port"):
        gnmi_sonic.sides_of(names)


@pytest.mark.parametrize(
    ("row", "state"),
    [
        # "a_side_status", "b_side_status": "blocked" / "tuning" / "tuned" / "failed"
        ({"a_side": "1A", "b_side": "2B", "a_side_status": "tuned", "b_side_status": "tuned"}, CircuitState.TUNED),
        ({"a_side": "1A", "b_side": "2B", "a_side_status": "tuned", "b_side_status": "tuning"}, CircuitState.TUNING),
        ({"a_side": "1A", "b_side": "2B", "a_side_status": "blocked", "b_side_status": "tuned"}, CircuitState.TUNING),
        ({"a_side": "1A", "b_side": "2B", "a_side_status": "failed", "b_side_status": "tuned"}, CircuitState.FAILED),
        ({"physical_path": "", "status": "enabled", "insertion_loss_dB": "N/A"}, CircuitState.TUNED),
        ({"physical_path": "", "status": "disabled", "insertion_loss_dB": "N/A"}, CircuitState.TUNING),
        ({"physical_path": "", "status": "invalid", "insertion_loss_dB": "N/A"}, CircuitState.FAILED),
        ({"status": "an unknown state"}, CircuitState.TUNING),
        ({}, CircuitState.TUNING),
    ],
)
def test_circuit_is_tuned_only_if_both_sides_are(row: dict[str, str], state: CircuitState) -> None:
    ordered = {"1A-2B": {"a_side": "1A", "b_side": "2B"}}
    shown = {"1A-2B": row} if row else {}
    assert gnmi_sonic.circuits(SonicPorts(16, 16), ordered, shown) == [DeviceCircuit(CrossConnect(1, 18), state)]


def test_circuits_include_rows_of_either_table() -> None:
    shown = {"2A-1B": {"a_side_status": "tuned", "b_side_status": "tuned"}}
    found = gnmi_sonic.circuits(SonicPorts(16, 16), {"1A-16B": {"a_side": "1A", "b_side": "16B"}}, shown)
    assert [str(circuit.cross_connect) for circuit in found] == ["1:32", "2:17"]
    with pytest.raises(ValueError, match="a_side and b_side of cross-connect 1A-16B must be"):
        gnmi_sonic.circuits(SonicPorts(16, 16), {"1A-16B": {"a_side": "1A", "b_side": "2B"}}, {})


def test_port_states_parse_both_table_designs() -> None:
    ordered = {"1A": {"label": "router1_port1", "state": "force_blocked"}, "1B": {"config_status": "normal"}}
    ordered |= {"2A": {"config_status": "powered_off"}, "2B": {"state": "normal"}, "3A": {}, "3B": {}}
    shown = {"2B": {"oper_status": "failed"}, "3A": {"status": "failed"}, "1B": {"oper_status": "connected"}}
    states = {state.port: state.status for state in gnmi_sonic.port_states(SonicPorts(3, 3), ordered, shown)}
    disabled, failed, enabled = PortStatus.DISABLED, PortStatus.FAILED, PortStatus.ENABLED
    assert states == {1: disabled, 2: disabled, 3: failed, 4: enabled, 5: failed, 6: enabled}


NAMES = st.from_regex(r"[a-z][a-z-]{0,8}", fullmatch=True)
ELEMS = st.builds(Elem, NAMES, st.dictionaries(NAMES, NAMES, max_size=2).map(lambda keys: tuple(sorted(keys.items()))))


@given(st.lists(ELEMS, min_size=1, max_size=6).map(tuple), st.sampled_from(["", "sonic-db", "openconfig"]))
def test_paths_match_pygnmi(elems: tuple[Elem, ...], origin: str) -> None:
    message = path_to_pb(elems, origin)
    assert path_from_pb(message) == elems
    written = shown(elems) if not origin else f"{origin}:{shown(elems).removeprefix('/')}"
    assert gnmi_path_generator(written) == message


@given(st.integers(1, 64), st.integers(1, 64))
def test_deletion_path_names_one_circuit(a: int, b: int) -> None:
    where = gnmi_sonic.cross_connect_path(f"{a}A-{b}B")
    assert shown(where) == f"/CONFIG_DB/localhost/OCS_CROSS_CONNECT/{a}A-{b}B"
    known = OpenConfigTopology("1", Connectivity.INGRESS_EGRESS, range(1, 65), range(65, 129))
    where = gnmi_openconfig.connection_path(known, a)
    assert shown(where) == f"/optical-switch/port-connections/port-connection[port={a}][slot=1]"
    for nothing in ("", "1A", "1A-", "*", "1A-2B/a_side"):
        with pytest.raises(ValueError, match="1A-2B"):
            gnmi_sonic.cross_connect_path(nothing)


def test_tree_merges_rows_and_leaves() -> None:
    whole = tree([(path("CONFIG_DB", "localhost"), {"OCS_CROSS_CONNECT": {"1A-2B": {"a_side": "1A", "b_side": "2B"}}})])
    row = path("CONFIG_DB", "localhost", "OCS_CROSS_CONNECT", "1A-2B")
    leaves = tree([((*row, Elem("a_side")), "1A"), ((*row, Elem("b_side")), "2B")])
    assert whole == leaves
    listed = path("port-connections", Elem("port-connection", (("port", "3"), ("slot", "1"))), "config")
    entry = {"port": "3", "slot": "1", "config": {"peer-slot": "1", "peer-port": "19"}}
    one = tree([((*listed, Elem("peer-slot")), "1"), ((*listed, Elem("peer-port")), "19")])
    assert one == {"port-connections": {"port-connection": [entry]}}


def test_connection_listed_under_both_ports_is_one_circuit() -> None:
    known = OpenConfigTopology("1", Connectivity.ANY_TO_ANY, range(1, 33), range(1, 33))
    ends = [("7", "3", "config"), ("7", "3", "state"), ("3", "7", "config"), ("4", "5", "config"), ("9", "", "config")]
    listed = [{"slot": "1", "port": port, kind: {"peer-slot": "1", "peer-port": peer}} for port, peer, kind in ends]
    listed.append({"slot": "2", "port": "4", "config": {"peer-slot": "2", "peer-port": "6"}})
    assert gnmi_openconfig.circuits(known, {"port-connection": listed}) == {
        DeviceCircuit(CrossConnect(3, 7)): {3, 7},
        DeviceCircuit(CrossConnect(4, 5), CircuitState.TUNING): {4},
    }
    wrong = {"slot": "1", "port": "4", "config": {"peer-slot": "2", "peer-port": "6"}}
    with pytest.raises(ValueError, match=r"peer-slot of port \d+ must be"):
        gnmi_openconfig.circuits(known, {"port-connection": [wrong]})


def test_topology_parses_documented_state() -> None:
    state = {"port-connectivity": "INGRESS_EGRESS", "total-port-count": 272, "total-optical-module-count": 2}
    state |= {"ingress-port-count": 136, "egress-port-count": 136, "ingress-start-index": 1, "egress-start-index": 1}
    known = gnmi_openconfig.topology(state, "2")
    assert (known.ingress_ports, known.egress_ports) == (range(1, 137), range(1, 137))
    assert gnmi_openconfig.topology({**state, "port-connectivity": "ANY_TO_ANY"}, "1").egress_ports == range(1, 273)
    for wrong in ({"port-connectivity": "SOME"}, {"egress-start-index": "one"}, {"ingress-port-count": None}):
        with pytest.raises(ValueError, match="got"):
            gnmi_openconfig.topology({**state, **wrong}, "1")
    with pytest.raises(ValueError, match="got '3'"):
        gnmi_openconfig.topology(state, "3")


# An independent client against the emulators: pygnmi's, which blocks and runs in a thread.


def client(address: str, **options: Any) -> gNMIclient:
    host, _, port = address.rpartition(":")
    return gNMIclient(target=(host, int(port)), gnmi_timeout=60, **{"insecure": True, **options})


async def test_pygnmi_sets_and_reads_sonic_rows() -> None:
    emulator = sonic(FAST)

    def drive(address: str) -> None:
        with client(address) as session:
            models = session.capabilities()["supported_models"]
            assert [model["name"] for model in models] == ["sonic-db"]
            row = {"a_side": "1A", "b_side": "2B"}
            answer = session.set(update=[(ROW.format("1A-2B"), row)], encoding="json_ietf")
            assert answer["response"][0]["op"] == "UPDATE"
            got = session.get(path=[ROW.format("1A-2B")], encoding="json_ietf")
            assert got["notification"][0]["update"][0]["val"] == row
            # Delete, replace, update: a row that is deleted and set in one request exists afterwards.
            other = {"a_side": "3A", "b_side": "2B"}
            session.set(delete=[ROW.format("1A-2B")], replace=[(ROW.format("3A-2B"), other)], encoding="json_ietf")
            table = session.get(path=[ROW.format("")], encoding="json_ietf")["notification"][0]["update"][0]["val"]
            assert table == {"3A-2B": other}
            for wrong in ("9A-1B", "1B-1A"):
                with pytest.raises(gNMIException, match="must"):
                    session.set(update=[(ROW.format(wrong), row)], encoding="json_ietf")
            with pytest.raises(gNMIException, match="No valid entry"):
                session.get(path=[ROW.format("1A-2B")], encoding="json_ietf")

    async def use(address: str) -> None:
        await asyncio.to_thread(drive, address)

    await at(emulator, use)


# pygnmi's subscription thread raises when its channel is closed.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_pygnmi_sets_openconfig_and_receives_updates() -> None:
    emulator = openconfig(FAST)

    def drive(address: str) -> None:
        with client(address) as session:
            ends = {"slot": "1", "port": "3", "peer-slot": "1", "peer-port": "9"}
            watched = {"path": "/optical-switch/port-connections", "mode": "on_change"}
            wanted = {"subscription": [watched], "mode": "stream", "encoding": "json_ietf"}
            told = session.subscribe_stream(subscribe=wanted)
            assert told.get_update(timeout=60)["sync_response"] is True
            session.set(update=[(CONNECTION.format(3) + "/config", ends)], encoding="json_ietf")
            assert told.get_update(timeout=60)["update"]["update"][0]["val"]["config"] == ends
            got = session.get(path=[CONNECTION.format(3)], encoding="json_ietf")
            assert got["notification"][0]["update"][0]["val"]["config"] == ends
            session.set(delete=[CONNECTION.format(3)])
            while "delete" not in (update := told.get_update(timeout=60)["update"]):
                assert update["update"][0]["val"]["port"] == "3"
            told.close()

    async def use(address: str) -> None:
        await asyncio.to_thread(drive, address)

    await at(emulator, use)


# The driver against the emulators, beyond the suite.


@pytest.mark.parametrize("make", [sonic, openconfig])
async def test_320_ports_need_one_transaction(make: Callable[..., GnmiEmulator]) -> None:
    emulator = make(DevicePanel(320, 320, reconfiguration_s=0.002))
    pairs = tuple(CrossConnect(port, 641 - port) for port in range(1, 321))
    model = "sonic" if make is sonic else "openconfig"

    async def use(address: str) -> None:
        driver = driver_for(address, model=model, tune_timeout_s=60.0)
        result = await carry_out(driver, pairs)
        assert result.done
        assert result.commands_sent == len(emulator.device.setters) == 1
        assert await connected(driver) == frozenset(pairs)
        assert (await carry_out(driver, disconnect=pairs)).done
        assert len(emulator.device.setters) == 2
        await driver.close()

    await at(emulator, use)


@pytest.mark.parametrize("origin", ["sonic-db", "sonic_db"])
async def test_origin_defaults_to_announced_one(origin: str) -> None:
    emulator = sonic(FAST, origin=origin)

    async def use(address: str) -> None:
        driver = driver_for(address)
        facts = await driver.facts()
        assert (facts.model, facts.ingress_ports, facts.egress_ports) == ("OCS-V", range(1, 9), range(9, 17))
        await driver.close()
        driver = driver_for(address, origin="openconfig")
        async with refusal(DriverPermanent, "origin 'openconfig' is not supported"):
            await driver.facts()
        await driver.close()

    await at(emulator, use)


async def test_leftover_order_is_neither_free_nor_tuned() -> None:
    emulator = sonic(FAST, leftovers=True)
    pairs = (CrossConnect(1, 9), CrossConnect(2, 10))

    async def use(address: str) -> None:
        driver = driver_for(address, tune_timeout_s=0.05)
        diff = await driver.plan(CircuitChange(pairs))
        emulator.device.inject(DeviceFault(DeviceFaultKind.PARTIAL_COMMIT, items=1, silent=True))
        result = await driver.commit(diff, diff.revision)
        assert [item.done for item in result.items] == [True, False]
        assert "tuning" in result.items[1].detail
        async with refusal(CircuitConflict, "2:10"):
            await driver.plan(CircuitChange((CrossConnect(2, 11),)))
        assert (await driver.rollback(diff)).done
        assert await connected(driver) == frozenset()
        assert (await carry_out(driver, (CrossConnect(2, 11),))).done
        await driver.close()

    await at(emulator, use)


async def test_events_end_when_the_connection_breaks() -> None:
    emulator = sonic(FAST)

    async def use(address: str) -> None:
        driver = driver_for(address)
        async with aclosing(driver.watch()) as events:
            first = asyncio.ensure_future(anext(events))
            pairs = [CrossConnect(port, port + 8) for port in range(1, 9)]
            while not first.done() and pairs:
                await carry_out(driver, (pairs.pop(),))
            event = await asyncio.wait_for(first, 60)
            assert event.kind is EventKind.CIRCUIT
            assert event.cross_connect in {CrossConnect(port, port + 8) for port in range(1, 9)}
            emulator.device.inject(DeviceFault(DeviceFaultKind.RESTART))
            async with refusal(DriverRetryable, "ocs1", "UNAVAILABLE"):
                while True:
                    await asyncio.wait_for(anext(events), 60)
        assert await connected(driver) == frozenset()  # over a new connection, to a device that lost its circuits
        await driver.close()

    await at(emulator, use)


@pytest.mark.parametrize("make", [sonic, openconfig])
async def test_port_event_follows_status_change(make: Callable[..., GnmiEmulator]) -> None:
    """Check port events. A moving mirror does not change a port's status; it is an event of its circuit."""
    emulator = make(FAST)
    pair = CrossConnect(2, 12)

    async def use(address: str) -> None:
        driver = driver_for(address, model="sonic" if make is sonic else "openconfig")
        told: list[SwitchEvent] = []

        async def hear(*last: object) -> None:
            while not told or (told[-1].port, told[-1].cross_connect, told[-1].text) != last:
                told.append(await asyncio.wait_for(anext(events), 60))

        async with aclosing(driver.watch()) as events:
            first = asyncio.ensure_future(anext(events))
            while not first.done():  # listening begins at an unknown moment
                await carry_out(driver, (CrossConnect(1, 9),))
                await carry_out(driver, disconnect=(CrossConnect(1, 9),))
            await first
            assert (await carry_out(driver, (pair,))).done
            await hear(None, pair, "2:12 tuned")
            emulator.device.inject(DeviceFault(DeviceFaultKind.FAIL_PORT, 6))
            await hear(6, None, "port 6 failed")
            emulator.device.inject(DeviceFault(DeviceFaultKind.MEND_PORT, 6))
            await hear(6, None, "port 6 enabled")
            emulator.device.inject(DeviceFault(DeviceFaultKind.DISABLE_PORT, 3))
            await hear(3, None, "port 3 disabled")
            assert (await carry_out(driver, disconnect=(pair,))).done
            await hear(None, pair, "2:12 is gone")
        assert {event.port for event in told if event.kind is EventKind.PORT} == {3, 6}
        await driver.close()

    await at(emulator, use)


@pytest.mark.parametrize("code", list(grpc.StatusCode))
async def test_only_refusal_codes_are_permanent_for_setters(code: grpc.StatusCode) -> None:
    async def fail() -> None:
        raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details="its words")

    refused = {"INVALID_ARGUMENT", "NOT_FOUND", "ALREADY_EXISTS", "PERMISSION_DENIED", "UNAUTHENTICATED"}
    refused |= {"FAILED_PRECONDITION", "OUT_OF_RANGE", "UNIMPLEMENTED"}
    for is_setter, otherwise in ((True, DriverOutcomeUnknown), (False, DriverRetryable)):
        with pytest.raises(DriverPermanent if code.name in refused else otherwise) as raised:
            await _translated("Set", fail(), is_setter=is_setter)
        assert raised.value.answer == f"{code.name}: its words"


async def test_wrong_password_is_permanent() -> None:
    emulator = openconfig(FAST, user="admin", password="secret")

    async def use(address: str) -> None:
        driver = driver_for(address, model="openconfig", user="admin", password="wrong")
        async with refusal(DriverPermanent, "ocs1", "UNAUTHENTICATED: Invalid Username or Password"):
            await driver.facts()
        await driver.close()

    await at(emulator, use)


async def test_wrong_model_is_permanent() -> None:
    async def use(address: str) -> None:
        driver = driver_for(address)
        async with refusal(DriverPermanent, "ocs1"):
            await driver.facts()
        await driver.close()

    await at(openconfig(FAST), use)


async def test_unreachable_switch_is_retryable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    driver = driver_for(f"127.0.0.1:{port}")
    async with refusal(DriverRetryable, "ocs1", "UNAVAILABLE"):
        await driver.facts()
    # The failure is not cached for the address: once the switch is up, it is reachable at once.
    emulator = sonic(FAST)
    await emulator.start(port=port)
    assert await connected(driver) == frozenset()
    await driver.close()
    await emulator.stop()


def _certificate(folder: Path, name: str, issuer: str | None = None) -> None:
    """Write NAME.crt and NAME.key to the folder, signed by ISSUER's key there or self-signed."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    signer, signed_by = key, subject
    if issuer is not None:
        loaded = serialization.load_pem_private_key((folder / f"{issuer}.key").read_bytes(), None)
        assert isinstance(loaded, ec.EllipticCurvePrivateKey)
        signer, signed_by = loaded, x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)])
    begin = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
    builder = x509.CertificateBuilder(signed_by, subject, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(begin).not_valid_after(begin.replace(year=2100))
    builder = builder.add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
    alternatives = [x509.DNSName(name), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    builder = builder.add_extension(x509.SubjectAlternativeName(alternatives if issuer else alternatives[:1]), False)
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    (folder / f"{name}.crt").write_bytes(builder.sign(signer, hashes.SHA256()).public_bytes(pem))
    (folder / f"{name}.key").write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))


async def test_tls_authenticates_both_sides(tmp_path: Path) -> None:
    for name, issuer in (("ca", None), ("switch", "ca"), ("ours", "ca"), ("stranger", None)):
        _certificate(tmp_path, name, issuer)
    files = {name: str(tmp_path / name) for name in ("ca.crt", "switch.crt", "switch.key", "ours.crt", "ours.key")}
    theirs = {"tls_cert_file": files["switch.crt"], "tls_key_file": files["switch.key"]}
    emulator = sonic(FAST, **theirs, tls_client_ca_file=files["ca.crt"])
    trusted = {"tls": True, "tls_ca_file": files["ca.crt"]}
    ours = {"tls_cert_file": files["ours.crt"], "tls_key_file": files["ours.key"]}

    async def use(address: str) -> None:
        for right in ({}, {"tls_server_name": "switch"}):
            driver = driver_for(address, **trusted, **ours, **right)
            assert (await carry_out(driver, (CrossConnect(1, 9),))).done or right
            await driver.close()
        strange = {"tls_ca_file": str(tmp_path / "stranger.crt")}
        for wrong in ({**trusted}, {**trusted, **ours, **strange}, {**trusted, **ours, "tls_server_name": "other"}):
            driver = driver_for(address, **wrong)
            async with refusal(DriverRetryable, "ocs1"):
                await driver.facts()
            await driver.close()
        driver = driver_for(address, **trusted, tls_cert_file=str(tmp_path / "no"), tls_key_file=files["ours.key"])
        async with refusal(DriverPermanent, "/no: No such file or directory"):
            await driver.facts()
        await driver.close()

    await at(emulator, use)


def test_invalid_options_are_all_reported() -> None:
    wrong = {"address": "", "model": "cli", "tls": False, "tls_ca_file": "ca.crt", "tls_cert_file": "c", "slot": ""}
    with pytest.raises(InvalidOptions) as refused:
        make_driver("gnmi", "ocs1", {**wrong, "password": "x", "reconfiguration_s": "fast"})
    told = sorted({fault.partition(":")[0].removeprefix("options.") for fault in refused.value.faults})
    assert told == sorted(["address", "model", "slot", "tls_ca_file", "tls_cert_file", "user", "reconfiguration_s"])
