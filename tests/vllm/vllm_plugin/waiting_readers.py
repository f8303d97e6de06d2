"""A plug-in for vLLM that makes processes of one server sleep while they wait for each other.

By default a reader of vLLM's message queue spins for a second after each message. If several servers share two cores, a
spinning reader takes a core from the process for which it waits.
"""

import time

POLL_S = 0.0005


def register() -> None:
    from vllm.distributed.device_communicators import shm_broadcast

    shm_broadcast.sched_yield = lambda: time.sleep(POLL_S)
