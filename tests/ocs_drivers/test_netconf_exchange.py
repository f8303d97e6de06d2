"""NETCONF interoperability: documented messages, ncclient against the emulator, and authentication."""

import asyncio
import re
import socket
import xml.etree.ElementTree as ElementTree
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import ncclient.manager
import paramiko
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ncclient.operations import RPCError

from ocs_drivers import netconf
from ocs_drivers import polatis_yang as yang
from ocs_drivers.base import OcsDriver
from ocs_drivers.conformance import carry_out, connected, refusal
from ocs_drivers.emulators import netconf_store as text
from ocs_drivers.emulators.base import DevicePanel
from ocs_drivers.emulators.netconf import NetconfEmulator
from ocs_drivers.errors import DriverPermanent, DriverRetryable, InvalidOptions
from ocs_drivers.faults import DeviceFault, DeviceFaultKind
from ocs_drivers.model import Action, BootBehaviour, CircuitChange, CrossConnect, PortState, PortStatus
from ocs_drivers.registry import make_driver

NS = 'xmlns="http://www.polatis.com/yang/optical-switch"'
FAST = DevicePanel(8, 8, reconfiguration_s=0.002)
PATIENCE = {"command_timeout_s": 60.0}


def driver_for(emulator: NetconfEmulator, address: str, **options: Any) -> OcsDriver:
    given = {"address": address, "password": "root", "host_key": emulator.host_key, **PATIENCE, **options}
    return make_driver("netconf", "ocs1", given)


async def at(emulator: NetconfEmulator, use: Callable[[str], Awaitable[None]]) -> None:
    address = await emulator.start()
    try:
        await use(address)
    finally:
        await emulator.stop()


# Writing and parsing.


def test_edit_contains_only_the_pairs() -> None:
    pairs = (CrossConnect(1, 13), CrossConnect(2, 14))
    assert netconf.edit("2017-08-04", Action.ADD, pairs) == (
        '<nc:config xmlns:nc="urn:ietf:params:xml:ns:netconf:base:1.0">'
        f"<cross-connects {NS}>"
        '<pair nc:operation="merge"><ingress>1</ingress><egress>13</egress></pair>'
        '<pair nc:operation="merge"><ingress>2</ingress><egress>14</egress></pair>'
        "</cross-connects></nc:config>"
    )
    # "Revisions before 2017-08-04 name the list `pairs`."
    old = netconf.edit("2017-02-09", Action.REMOVE, pairs[:1])
    assert '<pairs nc:operation="delete"><ingress>1</ingress><egress>13</egress></pairs>' in old
    with pytest.raises(ValueError, match="empty"):
        netconf.edit("2017-08-04", Action.REMOVE, ())


@given(
    st.sampled_from(["2015-09-14", "2017-08-03", "2017-08-04", "2018-03-22"]),
    st.sampled_from(list(Action)),
    st.lists(st.builds(CrossConnect, st.integers(1, 65535), st.integers(1, 65535)), min_size=1, max_size=20),
)
def test_edit_marks_each_pair_but_not_the_collection(revision: str, action: Action, pairs: list[CrossConnect]) -> None:
    config = ElementTree.fromstring(netconf.edit(revision, action, pairs))
    (tree,) = config
    operation = "{urn:ietf:params:xml:ns:netconf:base:1.0}operation"
    assert config.attrib == {}
    assert tree.attrib == {}
    assert {entry.get(operation) for entry in tree} == {"merge" if action is Action.ADD else "delete"}
    assert {entry.tag.rpartition("}")[2] for entry in tree} == {yang.pair_list(revision)}
    if len({pair.ingress_port for pair in pairs}) == len(pairs):  # as switches list them
        assert yang.cross_connects(netconf.plain(config)) == pairs


def test_ports_parse_both_model_revisions() -> None:
    new = ElementTree.fromstring(
        f"<data><port-config {NS}><port><port-id>1</port-id><status>ENABLED</status></port>"
        "<port><port-id>2</port-id><status>DISABLED</status></port>"
        "<port><port-id>3</port-id><status>FAILED</status></port>"
        "<port><port-id>4</port-id><status>UNSUPPORTED</status></port></port-config>"
        f"<opm-power {NS}><port><port-id>3</port-id><power>-2.50</power></port></opm-power></data>"
    )
    assert yang.ports(netconf.plain(new)) == [
        PortState(1, PortStatus.ENABLED),
        PortState(2, PortStatus.DISABLED),
        PortState(3, PortStatus.FAILED, -2.5),
        PortState(4, PortStatus.ENABLED),  # "the port doesn't have the enable/disable feature"
    ]
    old = ElementTree.fromstring(
        f"<data><ports {NS}><port><port-id>1</port-id><port-status>PO_FAILED</port-status>"
        "<opm><power>-40.00</power></opm></port></ports></data>"
    )
    assert yang.ports(netconf.plain(old)) == [PortState(1, PortStatus.FAILED, -40.0)]


@pytest.mark.parametrize(
    ("capabilities", "revision"),
    [
        (["http://www.polatis.com/yang/optical-switch?module=optical-switch&revision=2017-08-04"], "2017-08-04"),
        (
            ["http://www.polatis.com/yang/optical-switch?revision=2015-09-14&module=optical-switch&features=x"],
            "2015-09-14",
        ),
        (["http://www.polatis.com/yang/optical-switch"], ""),
        (["http://www.polatis.com/yang/optical-switch?module=optical-switch&revision=latest"], ""),
        (["http://www.polatis.com/yang/polatis-switch?module=polatis-switch&revision=2018-01-19"], None),
        (["urn:ietf:params:netconf:base:1.0"], None),
    ],
)
def test_module_revision_parses_hello(capabilities: list[str], revision: str | None) -> None:
    assert netconf.module_revision(capabilities, yang.NAMESPACE, yang.MODULE) == revision


@given(st.lists(st.binary(min_size=1, max_size=300), min_size=1, max_size=5), st.integers(1, 50), st.booleans())
def test_framing_reassembles_messages_from_pieces(messages: list[bytes], size: int, is_chunked: bool) -> None:
    if not is_chunked:
        messages = [message.replace(b"]", b"") for message in messages]
    sender, receiver = text.Framing(), text.Framing()
    sender.is_chunked = receiver.is_chunked = is_chunked
    stream = b"".join(sender.frame(message) for message in messages)
    got = []
    for begin in range(0, len(stream), size):
        receiver.feed(stream[begin : begin + size])
        while (message := receiver.next()) is not None:
            got.append(message)
    assert got == messages


def test_framing_parses_rfc_6242_example() -> None:
    framing = text.Framing()
    framing.is_chunked = True
    framing.feed(b'\n#4\n<rpc\n#18\n message-id="102"\n\n#79\n     xmlns="urn:ietf:params:xml:ns:netconf:base:1.0">\n')
    framing.feed(b"  <close-session/>\n</rpc>\n##\n")
    message = framing.next()
    assert message is not None
    assert text.parse(message).get("message-id") == "102"
    for wrong in (b"#4\n", b"\n#0\n", b"\n#+4\n", b"\n##\n"):
        framing = text.Framing()
        framing.is_chunked = True
        framing.feed(wrong)
        with pytest.raises(text.FramingError):
            framing.next()


# An independent client against the emulator: ncclient with its public API.


@pytest.mark.parametrize("base", ["1.0", "1.1"])
async def test_ncclient_edits_and_reads_emulator(base: str) -> None:
    emulator = NetconfEmulator(FAST, base=base)

    def drive(port: int) -> None:
        login = {"username": "admin", "password": "root", "hostkey_verify": False, "look_for_keys": False}
        with ncclient.manager.connect(host="127.0.0.1", port=port, allow_agent=False, timeout=60, **login) as manager:
            assert (":base:1.1" in manager.server_capabilities) is (base == "1.1")
            pair = "<pair><ingress>1</ingress><egress>{}</egress></pair>"
            config = f'<config xmlns="{text.BASE}"><cross-connects {NS}>{{}}</cross-connects></config>'
            assert manager.edit_config(config.format(pair.format(13)), target="running").ok
            shown = manager.get_config("running", filter=("subtree", f"<cross-connects {NS}/>")).data_xml
            assert re.search("<ingress>1</ingress>.*<egress>13</egress>", re.sub(r"\w+:|\s", "", shown))
            # Setting a pair in use re-routes it silently.
            assert manager.edit_config(config.format(pair.format(14)), target="running").ok
            with pytest.raises(RPCError, match="egress port 99 does not exist"):
                manager.edit_config(config.format(pair.format(99)), target="running")
            with pytest.raises(RPCError, match="data to delete does not exist"):
                manager.edit_config(
                    config.format('<pair operation="delete"><ingress>2</ingress></pair>').replace(
                        "pair operation", f'pair xmlns:nc="{text.BASE}" nc:operation'
                    ),
                    target="running",
                )
            with manager.locked("running"):
                pass
            one = f"<port-config {NS}><port><port-id>3</port-id><status/></port></port-config>"
            request = ncclient.xml_.to_ele(f"<port-set-state {NS}><port-disab>3</port-disab></port-set-state>")
            assert manager.dispatch(request).ok
            assert "DISABLED" in manager.get(filter=("subtree", one)).data_xml
            with pytest.raises(RPCError, match="not supported"):
                manager.copy_config("running", "startup")

    async def use(address: str) -> None:
        await asyncio.to_thread(drive, int(address.rpartition(":")[2]))
        assert emulator.device.where_does(1) in (14, None)  # the mirrors may still be moving
        assert len(emulator.device.setters) == 3

    await at(emulator, use)


async def test_commit_fails_while_another_client_holds_lock() -> None:
    emulator = NetconfEmulator(FAST)

    def lock(port: int) -> Any:
        login = {"username": "admin", "password": "root", "hostkey_verify": False, "look_for_keys": False}
        manager = ncclient.manager.connect(host="127.0.0.1", port=port, allow_agent=False, timeout=60, **login)
        manager.lock("running")
        return manager

    async def use(address: str) -> None:
        manager = await asyncio.to_thread(lock, int(address.rpartition(":")[2]))
        driver = driver_for(emulator, address)
        result = await carry_out(driver, (CrossConnect(1, 9),))
        assert not result.done
        assert "in-use: running is locked by session 1" in result.items[0].detail
        await asyncio.to_thread(manager.close_session)
        assert (await carry_out(driver, (CrossConnect(1, 9),))).done
        await driver.close()

    await at(emulator, use)


# The driver against the emulator, beyond the suite.


async def test_facts_are_read_from_product_information() -> None:
    emulator = NetconfEmulator(DevicePanel(24, 24, boot=BootBehaviour.RESTORE))

    async def use(address: str) -> None:
        driver = driver_for(emulator, address)
        facts = await driver.facts()
        assert (facts.vendor, facts.model, facts.serial) == ("Polatis", "I-OST-24x24-LU1-DMHNS", "002414")
        assert (facts.ingress_ports, facts.egress_ports) == (range(1, 25), range(25, 49))
        assert facts.boot is BootBehaviour.RESTORE
        await driver.close()

    await at(emulator, use)


@pytest.mark.parametrize("quirks", [{}, {"candidate": True}, {"revision": "2016-04-22", "base": "1.0"}])
async def test_320_ports_need_one_edit(quirks: dict[str, Any]) -> None:
    emulator = NetconfEmulator(DevicePanel(320, 320, reconfiguration_s=0.002), **quirks)
    pairs = tuple(CrossConnect(port, 641 - port) for port in range(1, 321))

    async def use(address: str) -> None:
        driver = driver_for(emulator, address, tune_timeout_s=60.0)
        result = await carry_out(driver, pairs)
        assert result.done
        assert result.commands_sent == len(emulator.device.setters) == 1
        assert await connected(driver) == frozenset(pairs)
        assert (await carry_out(driver, disconnect=pairs)).done
        assert len(emulator.device.setters) == 2
        await driver.close()

    await at(emulator, use)


async def test_partial_refusal_reports_device_message() -> None:
    emulator = NetconfEmulator(FAST)

    async def use(address: str) -> None:
        driver = driver_for(emulator, address)
        diff = await driver.plan(CircuitChange((CrossConnect(1, 9), CrossConnect(2, 10))))
        emulator.device.inject(DeviceFault(DeviceFaultKind.PARTIAL_COMMIT, items=1))
        result = await driver.commit(diff, diff.revision)
        assert [item.done for item in result.items] == [True, False]
        assert "operation-failed: MIRROR DRIVER ERROR AFTER 1 OF 2" in result.items[1].detail
        assert (await driver.rollback(diff)).done
        await driver.close()

    await at(emulator, use)


async def test_second_session_is_retryable_with_one_session() -> None:
    emulator = NetconfEmulator(FAST, one_session=True)

    async def use(address: str) -> None:
        one, other = driver_for(emulator, address), driver_for(emulator, address)
        await one.cross_connects()
        async with refusal(DriverRetryable, "ocs1", "the session failed"):
            await other.cross_connects()
        await one.close()
        assert await connected(other) == frozenset()
        await other.close()

    await at(emulator, use)


async def test_threads_end_with_their_sessions() -> None:
    import threading

    emulator = NetconfEmulator(FAST)

    async def use(address: str) -> None:
        driver = driver_for(emulator, address)
        diff = await driver.plan(CircuitChange((CrossConnect(1, 9),)))
        emulator.device.inject(DeviceFault(DeviceFaultKind.SLOW_ANSWER, delay_s=86400.0))
        commit = asyncio.ensure_future(driver.commit(diff, diff.revision))
        await asyncio.wait_for(emulator.device.holding_back.wait(), 60)
        left = [thread for thread in threading.enumerate() if thread.name.startswith("netconf-127.0.0.1")]
        commit.cancel()
        await asyncio.gather(commit, return_exceptions=True)
        assert await connected(driver) == {CrossConnect(1, 9)}  # by another session, in another thread
        await driver.close()
        for thread in left:
            await asyncio.to_thread(thread.join, 60)
            assert not thread.is_alive()

    await at(emulator, use)


async def test_option_revision_replaces_announced_one() -> None:
    emulator = NetconfEmulator(FAST, revision="")

    async def use(address: str) -> None:
        driver = driver_for(emulator, address)
        async with refusal(DriverPermanent, "revision", yang.NAMESPACE):
            await driver.facts()
        await driver.close()
        driver = driver_for(emulator, address, revision="2018-03-22")
        assert (await carry_out(driver, (CrossConnect(1, 9),))).done
        await driver.close()

    await at(emulator, use)


async def test_host_key_is_verified(tmp_path: Path) -> None:
    emulator, other = NetconfEmulator(FAST), NetconfEmulator(FAST)

    async def use(address: str) -> None:
        await other.start()
        await other.stop()
        host, port = address.split(":")
        known, strange = tmp_path / "known_hosts", tmp_path / "strange_hosts"
        known.write_text(f"[{host}]:{port} ecdsa-sha2-nistp256 {emulator.host_key}\n")
        strange.write_text(f"[{host}]:{port} ecdsa-sha2-nistp256 {other.host_key}\n")
        for right in ({"host_key": emulator.host_key}, {"host_key": "", "known_hosts": str(known)}):
            driver = driver_for(emulator, address, **right)
            assert await connected(driver) == frozenset()
            await driver.close()
        for wrong in ({"host_key": other.host_key}, {"host_key": "", "known_hosts": str(strange)}):
            driver = driver_for(emulator, address, **wrong)
            async with refusal(DriverPermanent, "ocs1", "Unknown host key"):
                await driver.cross_connects()
            await driver.close()
        assert emulator.device.setters == []

    await at(emulator, use)


async def test_login_with_key_file(tmp_path: Path) -> None:
    key = paramiko.ECDSAKey.generate()
    key.write_private_key_file(str(tmp_path / "key"))
    emulator = NetconfEmulator(FAST, authorized_key=key.get_base64())

    async def use(address: str) -> None:
        driver = driver_for(emulator, address, password="wrong")
        async with refusal(DriverPermanent, "authentication failed"):
            await driver.cross_connects()
        await driver.close()
        driver = driver_for(emulator, address, password="", key_file=str(tmp_path / "key"))
        assert await connected(driver) == frozenset()
        await driver.close()

    await at(emulator, use)


async def test_unreachable_switch_is_retryable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    driver = make_driver("netconf", "ocs1", {"address": f"127.0.0.1:{port}", "password": "x", **PATIENCE})
    async with refusal(DriverRetryable, "ocs1", "Connection refused"):
        await driver.facts()
    await driver.close()


def test_invalid_options_are_all_reported() -> None:
    wrong = {"address": "a b", "user": "", "revision": "newest", "size": "big", "power": 1, "reconfiguration_s": -1}
    with pytest.raises(InvalidOptions) as refused:
        make_driver("netconf", "ocs1", wrong)
    told = sorted(fault.partition(":")[0] for fault in refused.value.faults)
    assert told == [
        "options.address",
        "options.password",
        "options.power",
        "options.reconfiguration_s",
        "options.revision",
        "options.size",
        "options.user",
    ]
