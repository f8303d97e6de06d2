"""Rendezvous of process-group links, with a fake torch.distributed; tests/vllm has tests with the real one."""

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec, module_from_spec
from threading import Thread
from types import ModuleType
from typing import Any

import pytest

from orchestrrl.weights.transports.base import LinkBroken
from orchestrrl.weights.transports.conformance import PATIENT_S
from orchestrrl.weights.transports.listener import LinkListener, knock

HERE = "127.0.0.1"


class Store:
    port = 1

    def __init__(self, *_: Any, **__: Any) -> None: ...


@pytest.fixture
def transport(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a GroupTransport whose groups fail to join with an error that is not from torch."""
    torch, dist = ModuleType("torch"), ModuleType("torch.distributed")
    vars(torch).update(distributed=dist, Tensor=object)
    vars(dist).update(TCPStore=Store, PrefixStore=Store)
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "torch.distributed", dist)
    spec = find_spec("orchestrrl.weights.transports.groups")
    assert spec is not None
    assert spec.loader is not None
    groups = module_from_spec(spec)
    spec.loader.exec_module(groups)

    def join(self: Any, store: Any, rank: int) -> Any:
        raise OSError("no device")

    made = type("NoTransport", (groups.GroupTransport,), {"_join": join})(HERE)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"one", LinkBroken),
        (b"127.0.0.1:1 two three", LinkBroken),
        (b"\xff \xfe", LinkBroken),
        (b"nowhere prefix", LinkBroken),
        (b"127.0.0.1:1 prefix", OSError),
    ],
)
def test_failed_sender_closes_the_rendezvous(transport: Any, answer: bytes, error: type[Exception]) -> None:
    receiver = LinkListener(HERE)
    address = receiver.open()
    with ThreadPoolExecutor(1) as threads:
        dialled = threads.submit(transport.dial, address, "key", PATIENT_S)
        with receiver.accept("key", PATIENT_S, answer) as meeting:
            failed = dialled.exception(PATIENT_S)  # the sender's connection
            assert type(failed) is error
            meeting.settimeout(1.0)
            assert meeting.recv(1) == b""
    receiver.close()


def test_failed_receiver_closes_the_rendezvous(transport: Any) -> None:
    address = transport.open()
    with ThreadPoolExecutor(1) as threads:
        accepted = threads.submit(transport.accept, "key", PATIENT_S)
        meeting, _ = knock(address, "key", PATIENT_S)
        with meeting:
            assert type(accepted.exception(PATIENT_S)) is OSError
            meeting.settimeout(1.0)
            assert meeting.recv(1) == b""


class ClosedMeanwhile(dict[str, Any]):
    """A store cache in which another thread closes the transport after each lookup."""

    def __init__(self, close: Callable[[], None]) -> None:
        super().__init__()
        self.closing = Thread(target=close)

    def __setitem__(self, address: str, store: Any) -> None:
        super().__setitem__(address, store)
        self.closing.start()
        self.closing.join(0.2)


def test_close_does_not_invalidate_a_store_in_use(transport: Any) -> None:
    transport._stores = stores = ClosedMeanwhile(transport.close)
    assert isinstance(transport._connected("127.0.0.1:1"), Store)
    stores.closing.join(PATIENT_S)
    assert stores == {}
