"""The conformance suite of transports. Subclass it, implement `make_transport`, and run pytest:

    class TestMine(TransportConformance):
        def make_transport(self) -> Transport:
            return MyTransport("127.0.0.1")

Two transports exchange data within one process; each endpoint of a link has its own thread. In an environment without
pytest, such as a trainer's, `python -m orchestrrl.weights.transports.conformance NAME` runs the suite for the transport
NAME on the loopback interface.
"""

import contextlib
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from orchestrrl.weights.transports.base import (
    SMALL_BYTES,
    IncomingLink,
    LinkBroken,
    NotYet,
    OutgoingLink,
    PendingChunk,
    Transport,
    make_transport,
)

R = TypeVar("R")

PATIENT_S = 60.0
SHORT_S = 0.2
CHUNK_BYTES = 1024 * 1024


def pattern(size: int, seed: int = 0) -> bytes:
    """Return test bytes in which each block of 64 KiB differs from its neighbours."""
    words = bytes((7 * at + at // 251 + seed) % 256 for at in range(min(size, 65536)))
    whole = bytearray(words * (size // max(len(words), 1) + 1))[:size]
    for block, at in enumerate(range(0, size, 65536)):
        whole[at] = (block + seed) % 256
    return bytes(whole)


class TwoPeers:
    """A sending transport, a receiving transport, and threads for the endpoints of their links."""

    def __init__(self, make: Callable[[], Transport]) -> None:
        self.sender, self.receiver = make(), make()
        self.sender.open()
        self.address = self.receiver.open()
        self._threads = ThreadPoolExecutor(32)
        self._links: list[OutgoingLink | IncomingLink] = []

    def begin(self, call: Callable[[], R]) -> "Future[R]":
        return self._threads.submit(call)

    def link(self, key: str = "link") -> tuple[OutgoingLink, IncomingLink]:
        dialled = self.begin(lambda: self.sender.dial(self.address, key, PATIENT_S))
        accepted = self.receiver.accept(key, PATIENT_S)
        outgoing = dialled.result(PATIENT_S)
        self._links += [outgoing, accepted]
        return outgoing, accepted

    def exchange(
        self, link: tuple[OutgoingLink, IncomingLink], chunks: Sequence[bytes], *, closes: bool = False
    ) -> None:
        """Send chunks over a link and check that they arrive unchanged and in order. If `closes` is True, the sender
        closes the link as soon as it has sent the chunks."""

        def send() -> None:
            send_all(link[0], chunks)
            if closes:
                link[0].close()

        sent = self.begin(send)
        assert receive_all(link[1], [len(chunk) for chunk in chunks]) == chunks
        sent.result(PATIENT_S)

    def close(self) -> None:
        for link in self._links:
            link.close()
        self.sender.close()
        self.receiver.close()
        self._threads.shutdown()


@contextlib.contextmanager
def broken() -> Iterator[None]:
    """Check that the enclosed block raises LinkBroken."""
    try:
        yield
    except LinkBroken:
        return
    raise AssertionError("expected LinkBroken, nothing was raised")


def send_all(link: OutgoingLink, chunks: Sequence[bytes]) -> None:
    _two_in_flight(link.send, chunks)


def receive_all(link: IncomingLink, sizes: Sequence[int]) -> list[bytes]:
    """Receive chunks of the given sizes, each into a separate buffer, and return their contents."""
    into = [bytearray(size) for size in sizes]
    _two_in_flight(link.receive, into)
    return [bytes(each) for each in into]


def _two_in_flight(begin: Callable[[memoryview], PendingChunk], chunks: Sequence[bytes | bytearray]) -> None:
    flight: deque[PendingChunk] = deque()
    for chunk in chunks:
        if len(flight) == 2:
            flight.popleft().wait(PATIENT_S)
        flight.append(begin(memoryview(chunk)))
    for pending in flight:
        pending.wait(PATIENT_S)


class TransportConformance:
    """The tests that every transport must pass. Each test uses a new pair of transports, `self.two`."""

    def make_transport(self) -> Transport:
        raise TypeError(f"{type(self).__name__} must implement make_transport")

    def setup_method(self) -> None:
        self.two = TwoPeers(self.make_transport)

    def teardown_method(self) -> None:
        self.two.close()

    def test_chunks_arrive_unchanged_and_in_order(self) -> None:
        sizes = [1, 8, CHUNK_BYTES, 1000, 8, CHUNK_BYTES + 1, 3 * CHUNK_BYTES, 1]
        self.two.exchange(self.two.link(), [pattern(size, seed) for seed, size in enumerate(sizes)])

    def test_two_chunks_and_a_small_one_may_be_in_flight(self) -> None:
        chunks = [pattern(size, seed) for seed, size in enumerate((SMALL_BYTES, CHUNK_BYTES, CHUNK_BYTES))]
        outgoing, incoming = self.two.link()
        into = [bytearray(len(chunk)) for chunk in chunks]

        def send() -> None:
            for pending in [outgoing.send(memoryview(chunk)) for chunk in chunks]:
                pending.wait(PATIENT_S)

        sent = self.two.begin(send)
        for each in [incoming.receive(memoryview(each)) for each in into]:
            each.wait(PATIENT_S)
        sent.result(PATIENT_S)
        assert [bytes(each) for each in into] == chunks

    def test_receive_writes_only_the_given_memory(self) -> None:
        whole = bytearray(b"\xaa" * 300)
        outgoing, incoming = self.two.link()
        sent = self.two.begin(lambda: outgoing.send(memoryview(bytes(300))[100:200]).wait(PATIENT_S))
        incoming.receive(memoryview(whole)[100:200]).wait(PATIENT_S)
        sent.result(PATIENT_S)
        assert whole == b"\xaa" * 100 + bytes(100) + b"\xaa" * 100

    def test_the_receiver_may_accept_after_the_dial(self) -> None:
        dialled = self.two.begin(lambda: self.two.sender.dial(self.two.address, "late", PATIENT_S))
        time.sleep(SHORT_S)
        incoming, outgoing = self.two.receiver.accept("late", PATIENT_S), dialled.result(PATIENT_S)
        self.two.exchange((outgoing, incoming), [b"late"])
        outgoing.close()
        incoming.close()

    def test_accept_and_dial_raise_not_yet_without_the_other_endpoint(self) -> None:
        for call in (
            lambda: self.two.receiver.accept("nobody", SHORT_S),
            lambda: self.two.sender.dial(self.two.address, "nobody", SHORT_S),
        ):
            try:
                call()
            except NotYet:
                continue
            raise AssertionError("expected NotYet, nothing was raised")
        # The failed calls must not prevent a later link with the same key.
        self._exchange_one("nobody")

    def test_concurrent_links_do_not_mix_their_bytes(self) -> None:
        links = [self.two.link(f"{number}/{'x' * number}") for number in range(6)]
        chunks = [[pattern(CHUNK_BYTES // 4, number + 1)] * 4 for number in range(6)]
        exchanges = [partial(self.two.exchange, *each) for each in zip(links, chunks, strict=True)]
        for exchanged in [self.two.begin(each) for each in exchanges]:
            exchanged.result(PATIENT_S)

    def test_chunks_sent_before_close_arrive(self) -> None:
        for number in range(5):
            self.two.exchange(self.two.link(str(number)), [pattern(CHUNK_BYTES)] * 2, closes=True)

    def test_receiver_detects_that_the_sender_has_closed(self) -> None:
        outgoing, incoming = self.two.link()
        outgoing.close()
        with broken():
            incoming.receive(memoryview(bytearray(8))).wait(PATIENT_S)

    def test_sender_detects_that_the_receiver_has_closed(self) -> None:
        chunk = bytes(CHUNK_BYTES)
        outgoing, incoming = self.two.link()
        incoming.close()
        with broken():
            for _ in range(200):  # the kernel's buffers may accept several chunks
                outgoing.send(memoryview(chunk)).wait(PATIENT_S)

    def test_receiving_times_out_if_the_sender_is_silent(self) -> None:
        _, incoming = self.two.link()
        with broken():
            incoming.receive(memoryview(bytearray(8))).wait(SHORT_S)

    def test_sending_times_out_if_the_receiver_reads_nothing(self) -> None:
        chunk = bytes(CHUNK_BYTES)
        outgoing, _ = self.two.link()
        with broken():
            for _ in range(200):
                outgoing.send(memoryview(chunk)).wait(SHORT_S)

    def test_close_interrupts_a_waiting_call(self) -> None:
        outgoing, incoming = self.two.link()
        waits = threading.Event()

        def receive() -> None:
            pending = incoming.receive(memoryview(bytearray(8)))
            waits.set()
            with broken():
                pending.wait(PATIENT_S)

        received = self.two.begin(receive)
        assert waits.wait(PATIENT_S)
        time.sleep(SHORT_S)
        began_s = time.monotonic()
        incoming.close()
        received.result(PATIENT_S)
        assert time.monotonic() - began_s < PATIENT_S / 2
        outgoing.close()

    def test_a_key_may_be_used_again(self) -> None:
        for _ in range(3):
            self._exchange_one("again")

    def test_dial_raises_link_broken_if_nothing_listens(self) -> None:
        address = self.two.address
        self.two.receiver.close()
        with broken():
            self.two.sender.dial(address, "key", PATIENT_S)

    def test_closing_the_transport_interrupts_accept(self) -> None:
        accepted = self.two.begin(lambda: self.two.receiver.accept("key", PATIENT_S))
        time.sleep(SHORT_S)
        self.two.receiver.close()
        with broken():
            accepted.result(PATIENT_S)

    def test_close_may_be_called_twice(self) -> None:
        for link in self.two.link():
            link.close()
            link.close()
        self.two.sender.close()

    def _exchange_one(self, key: str) -> None:
        outgoing, incoming = self.two.link(key)
        self.two.exchange((outgoing, incoming), [b"word"])
        outgoing.close()
        incoming.close()


def main(names: Sequence[str]) -> None:
    class Named(TransportConformance):
        def make_transport(self) -> Transport:
            return make_transport(name, "127.0.0.1")

    for name in names:
        for test in sorted(each for each in dir(Named) if each.startswith("test_")):
            print(f"{name}: {test}", flush=True)  # noqa: T201
            suite = Named()
            suite.setup_method()
            try:
                getattr(suite, test)()
            finally:
                suite.teardown_method()


if __name__ == "__main__":
    main(sys.argv[1:])
