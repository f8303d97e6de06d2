"""torch.distributed's gloo: from memory to memory of hosts, wherever torch is; a device of torch is bound to the host.

Gloo's own threads move the bytes, so a chunk goes on while Python does something else. A wait whose time is over ends
the link, as gloo does with all that waits in a group; that is also how one that waits is interrupted.
"""

import contextlib
import warnings
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from orchestrrl.core.errors import Permanent
from orchestrrl.weights.transports.groups import GroupTransport, JoinedGroup, Wait
from orchestrrl.weights.transports.listener import ANSWERED_WITHIN_S

BYTES, INTERRUPT = 0, 1  # tags

# Chunks that are only sent may be of read-only memory, which torch has no word for.
warnings.filterwarnings("ignore", message="The given buffer is not writable", category=UserWarning)


class GlooTransport(GroupTransport):
    """All links share gloo's device, which listens on the host."""

    def __init__(self, host: str) -> None:
        if not dist.is_gloo_available():
            raise Permanent("transport gloo: this torch is built without gloo; use transport tcp")
        super().__init__(host)
        self._device: Any = None

    def open(self) -> str:
        self._device = dist.ProcessGroupGloo.create_device(hostname=self._host, lazy_init=False)
        return super().open()

    def _join(self, store: Any, rank: int) -> "_Gloo":
        options = dist.ProcessGroupGloo._Options()
        options._devices = [self._device]  # all links share its one thread
        options._timeout = timedelta(seconds=ANSWERED_WITHIN_S)
        options._threads = 1
        return _Gloo(dist.ProcessGroupGloo(store, rank, 2, options), rank)


class _Gloo(JoinedGroup):
    lingers = False  # its connections are closed as others are: what is in the kernel still goes out

    def send(self, chunk: torch.Tensor) -> Wait:
        work = self.group.send([chunk], self._other, BYTES)
        return lambda timeout: work.wait(timeout)

    def receive(self, into: torch.Tensor) -> Wait:
        work = self.group.recv([into], self._other, BYTES)
        return lambda timeout: work.wait(timeout)

    def interrupt(self) -> None:
        with contextlib.suppress(RuntimeError):  # it is meant to fail: with it, all that waits in the group does
            self.group.recv([torch.empty(1, dtype=torch.uint8)], self._other, INTERRUPT).wait(timedelta(milliseconds=1))

    def leave(self) -> None:
        self.group.shutdown()
        self.group = None
