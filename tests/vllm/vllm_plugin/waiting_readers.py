"""A plugin of vLLM: processes of one server that wait for each other sleep in between.

By itself a reader of vLLM's message queue spins for a second after each message. Where several servers share two cores,
a step that waits keeps what it waits for from a core.
"""

import time

POLL_S = 0.0005


def register() -> None:
    from vllm.distributed.device_communicators import shm_broadcast

    shm_broadcast.sched_yield = lambda: time.sleep(POLL_S)
