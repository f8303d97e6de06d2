"""The gloo transport of torch.distributed, which copies from host memory to host memory. It needs torch but no GPU.

Gloo's own threads move the bytes, so a chunk progresses while Python runs other code. A wait that times out breaks the
link, because gloo then fails every operation of the process group. `interrupt` relies on this behaviour.
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

# A chunk to send may be in read-only memory, which torch tensors do not support.
warnings.filterwarnings("ignore", message="The given buffer is not writable", category=UserWarning)


class GlooTransport(GroupTransport):
    """The gloo transport. All links share one gloo device, which is bound to the host's address."""

    def __init__(self, host: str) -> None:
        if not dist.is_gloo_available():
            raise Permanent("transport gloo needs a PyTorch build with gloo; use transport tcp")
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
    lingers = False  # gloo closes its connections regularly, so the kernel still sends buffered bytes

    def send(self, chunk: torch.Tensor) -> Wait:
        work = self.group.send([chunk], self._other, BYTES)
        return lambda timeout: work.wait(timeout)

    def receive(self, into: torch.Tensor) -> Wait:
        work = self.group.recv([into], self._other, BYTES)
        return lambda timeout: work.wait(timeout)

    def interrupt(self) -> None:
        with contextlib.suppress(RuntimeError):  # this receive times out, which fails every operation of the group
            self.group.recv([torch.empty(1, dtype=torch.uint8)], self._other, INTERRUPT).wait(timedelta(milliseconds=1))

    def leave(self) -> None:
        self.group.shutdown()
        self.group = None
