"""Plain sockets: the contract, and who knocks at the door that is nobody of ours."""

import contextlib
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from orchestrrl.core.errors import Permanent
from orchestrrl.weights.transports.base import TRANSPORTS, LinkBroken, Transport, make_transport
from orchestrrl.weights.transports.conformance import PATIENT_S, TransportConformance, receive_all, send_all
from orchestrrl.weights.transports.listener import GREETING, MAGIC, MOST_BYTES, MOST_STRANGERS, VERSION, parts_of
from orchestrrl.weights.transports.tcp import TcpTransport


class TestTcp(TransportConformance):
    def make_transport(self) -> Transport:
        return TcpTransport("127.0.0.1")

    @pytest.mark.parametrize(
        "said",
        [
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
            GREETING.pack(b"ELSE", VERSION, 3) + b"key",
            GREETING.pack(MAGIC, VERSION + 1, 3) + b"key",
            GREETING.pack(MAGIC, 1, 3) + b"key",  # it meets for groups in another way
            GREETING.pack(MAGIC, VERSION, MOST_BYTES + 1) + b"k" * 10_000,
            GREETING.pack(MAGIC, VERSION, 2) + b"\xff\xfe",
        ],
        ids=["http", "magic", "version", "first version", "length", "not text"],
    )
    def test_strangers_are_shown_out(self, said: bytes) -> None:
        with socket.create_connection(parts_of(self.two.address)) as stranger:
            stranger.settimeout(PATIENT_S)
            stranger.sendall(said)
            with contextlib.suppress(ConnectionResetError):  # it had not read all of it
                assert stranger.recv(1) == b""
            self._exchange_one("key")

    def test_a_crowd_that_says_nothing_keeps_nobody_out(self) -> None:
        crowd = [socket.create_connection(parts_of(self.two.address)) for _ in range(MOST_STRANGERS + 20)]
        self._exchange_one("key")
        crowd[0].settimeout(PATIENT_S)
        assert crowd[0].recv(1) == b""  # the first to come is the first to go
        for each in crowd:
            each.close()

    def test_who_has_left_is_not_taken_for_who_comes_later(self) -> None:
        with socket.create_connection(parts_of(self.two.address)) as gone:
            gone.sendall(GREETING.pack(MAGIC, VERSION, 3) + b"key")
        self._exchange_one("key")

    def test_a_key_may_come_in_pieces(self) -> None:
        with socket.create_connection(parts_of(self.two.address)) as slow:
            for byte in GREETING.pack(MAGIC, VERSION, 3) + b"key":
                slow.sendall(bytes([byte]))
            incoming = self.two.receiver.accept("key", PATIENT_S)
            slow.sendall(b"word")
            assert receive_all(incoming, [4]) == [b"word"]
            incoming.close()


class TestTcpWithoutRoom(TransportConformance):
    """Buffers far smaller than chunks, which move bit by bit."""

    def make_transport(self) -> Transport:
        return TcpTransport("127.0.0.1", buffer_bytes=32768)


def test_over_ipv6() -> None:
    try:
        there = TcpTransport("::1")
        address = there.open()
    except OSError:
        pytest.skip("this host has no IPv6 loopback")
    assert address.startswith("[::1]:")
    here = TcpTransport("::1")
    with ThreadPoolExecutor(1) as threads:
        dialled = threads.submit(here.dial, address, "key", PATIENT_S)
        incoming, outgoing = there.accept("key", PATIENT_S), dialled.result(PATIENT_S)
        send_all(outgoing, [b"word"])
        assert receive_all(incoming, [4]) == [b"word"]
    for each in (outgoing, incoming, there):
        each.close()


@pytest.mark.parametrize("address", ["", "host", "host:", ":7", "host:0", "host:99999"])
def test_an_address_that_is_none_breaks_the_link(address: str) -> None:
    with pytest.raises(LinkBroken, match="host:port"):
        TcpTransport("127.0.0.1").dial(address, "key", 1.0)


def test_transports_are_found_by_name() -> None:
    assert {"tcp", "gloo", "nccl"} <= set(TRANSPORTS.names())
    assert isinstance(make_transport("tcp", "127.0.0.1"), TcpTransport)
    with pytest.raises(Permanent, match=r"unknown transport 'pigeon'; known: .*tcp"):
        make_transport("pigeon", "127.0.0.1")
