"""The NCCL transport of torch.distributed, for hosts with GPUs. Chunks are copied through GPU memory.

Construction, errors and the code shared with gloo (groups.py) are tested. A transfer between two GPUs has not been
tested. Such a test needs two processes with one GPU each, because NCCL refuses two ranks on one GPU.

A chunk occupies a buffer on the GPU from the call of `send` or `receive` until the caller has waited for the chunk. A
link with two chunks and a small message in flight therefore has three buffers. Each link has its own stream, because a
receive is a kernel that runs until its bytes have arrived.
"""

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from orchestrrl.core.errors import Permanent
from orchestrrl.weights.transports.groups import GroupTransport, JoinedGroup, Wait

POLL_S = 0.0005


class NcclTransport(GroupTransport):
    """The NCCL transport. Chunks are copied through the memory of the process's first GPU."""

    def __init__(self, host: str) -> None:
        if not torch.cuda.is_available() or not dist.is_nccl_available():
            raise Permanent("transport nccl needs a GPU and a PyTorch build with CUDA and NCCL; use gloo or tcp")
        super().__init__(host)
        self._device = torch.device("cuda", 0)

    def _join(self, store: Any, rank: int) -> JoinedGroup:
        with torch.cuda.device(self._device):
            group = dist.ProcessGroupNCCL(store, rank, 2, dist.ProcessGroupNCCL.Options())
            joined = _Nccl(group, rank, self._device)
            joined.meet()
        return joined


class _Nccl(JoinedGroup):
    lingers = True

    def __init__(self, group: Any, rank: int, device: Any) -> None:
        super().__init__(group, rank)
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._interrupted = False

    def meet(self) -> None:
        """Exchange one byte, which makes NCCL create the communicator. Raises RuntimeError if the exchange fails."""
        one = torch.zeros(1, dtype=torch.uint8)
        begun = self.send(one) if self._other == 0 else self.receive(one)
        begun(timedelta(seconds=30))

    def send(self, chunk: torch.Tensor) -> Wait:
        with torch.cuda.stream(self._stream):
            bounce = chunk.to(self._device)
            work = self.group.send([bounce], self._other, 0)

        def wait(timeout: timedelta, _until_then: torch.Tensor = bounce) -> None:
            self._until(work, timeout)

        return wait

    def receive(self, into: torch.Tensor) -> Wait:
        with torch.cuda.stream(self._stream):
            bounce = torch.empty(into.shape, dtype=torch.uint8, device=self._device)
            work = self.group.recv([bounce], self._other, 0)

        def wait(timeout: timedelta) -> None:
            self._until(work, timeout)
            into.copy_(bounce)

        return wait

    def _until(self, work: Any, timeout: timedelta) -> None:
        """Wait for `work` by polling, because NCCL's own wait blocks only the CUDA stream, not the calling thread.
        Raises RuntimeError if the work fails, if it does not end within `timeout`, or if the link is closed."""
        until_s = time.monotonic() + timeout.total_seconds()
        while not work.is_completed():
            if self._interrupted:
                raise RuntimeError("the link is closed")
            if time.monotonic() >= until_s:
                raise RuntimeError(f"no progress for {timeout.total_seconds():g} s")
            time.sleep(POLL_S)
        if (error := work.exception()) is not None:
            raise RuntimeError(str(error))

    def interrupt(self) -> None:
        self._interrupted = True

    def leave(self) -> None:
        self.group.abort()  # also ends kernels that run on the GPU
        self.group = None
