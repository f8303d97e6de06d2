"""The TCP transport: conformance, and connections from foreign clients."""

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
            GREETING.pack(MAGIC, 1, 3) + b"key",  # version 1 had another rendezvous of groups
            GREETING.pack(MAGIC, VERSION, MOST_BYTES + 1) + b"k" * 10_000,
            GREETING.pack(MAGIC, VERSION, 2) + b"\xff\xfe",
        ],
        ids=["http", "magic", "version", "first version", "length", "not text"],
    )
    def test_foreign_connections_are_closed(self, said: bytes) -> None:
        with socket.create_connection(parts_of(self.two.address)) as stranger:
            stranger.settimeout(PATIENT_S)
            stranger.sendall(said)
            with contextlib.suppress(ConnectionResetError):  # it had not read everything
                assert stranger.recv(1) == b""
            self._exchange_one("key")

    def test_silent_connections_do_not_block_senders(self) -> None:
        crowd = [socket.create_connection(parts_of(self.two.address)) for _ in range(MOST_STRANGERS + 20)]
        self._exchange_one("key")
        crowd[0].settimeout(PATIENT_S)
        assert crowd[0].recv(1) == b""  # the oldest connection is closed first
        for each in crowd:
            each.close()

    def test_closed_connection_is_not_accepted(self) -> None:
        with socket.create_connection(parts_of(self.two.address)) as gone:
            gone.sendall(GREETING.pack(MAGIC, VERSION, 3) + b"key")
        self._exchange_one("key")

    def test_key_may_arrive_in_pieces(self) -> None:
        with socket.create_connection(parts_of(self.two.address)) as slow:
            for byte in GREETING.pack(MAGIC, VERSION, 3) + b"key":
                slow.sendall(bytes([byte]))
            incoming = self.two.receiver.accept("key", PATIENT_S)
            slow.sendall(b"word")
            assert receive_all(incoming, [4]) == [b"word"]
            incoming.close()


class TestTcpWithoutRoom(TransportConformance):
    """Conformance with socket buffers far smaller than a chunk."""

    def make_transport(self) -> Transport:
        return TcpTransport("127.0.0.1", buffer_bytes=32768)


def test_tcp_transport_works_over_ipv6() -> None:
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
def test_malformed_address_raises_link_broken(address: str) -> None:
    with pytest.raises(LinkBroken, match="host:port"):
        TcpTransport("127.0.0.1").dial(address, "key", 1.0)


def test_make_transport_finds_transports_by_name() -> None:
    assert {"tcp", "gloo", "nccl"} <= set(TRANSPORTS.names())
    assert isinstance(make_transport("tcp", "127.0.0.1"), TcpTransport)
    with pytest.raises(Permanent, match=r"unknown transport 'pigeon': must be one of .*tcp"):
        make_transport("pigeon", "127.0.0.1")
