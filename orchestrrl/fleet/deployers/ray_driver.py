"""The process in which a RayDeployer's calls to Ray are carried out: Ray ends a driver whose cluster is lost, its calls
block, and its version and Python's must be the cluster's.

It needs Ray and the standard library, nothing else of ours than the modules that it names; `ray_client.py` starts it
and talks to it. A line of input is a call, `{"id", "call", ...}`; a line of output its answer, `{"id", "value"}` or
`{"id", "error": {"kind", "message"}}`, as they end. The first call is `open`. It goes when its input ends.
"""

import contextlib
import json
import logging
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TextIO

from orchestrrl.fleet.deployers.ray_cluster import RayCluster
from orchestrrl.fleet.deployers.ray_places import RayRefusal

AT_ONCE = 32  # calls
log = logging.getLogger("orchestrrl.ray")


class RayResponses:
    """Carries calls out, each in a thread of whoever calls."""

    def __init__(self, output: TextIO) -> None:
        self._output = output
        self._writing = threading.Lock()

    def carry_out(self, number: int, call: Callable[..., Any], arguments: dict[str, Any]) -> None:
        try:
            answer: dict[str, Any] = {"value": call(**arguments)}
        except RayRefusal as refusal:
            answer = {"error": {"kind": refusal.kind, "message": str(refusal)}}
        except Exception as error:
            log.exception("call %s failed", number)
            answer = {"error": {"kind": "lost", "message": f"{type(error).__name__}: {error}"}}
        with self._writing, contextlib.suppress(OSError):
            self._output.write(json.dumps({"id": number, **answer}) + "\n")
            self._output.flush()


def main() -> None:
    # Whatever Ray prints is no answer.
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(message)s")
    answers = RayResponses(output)
    cluster: RayCluster | None = None
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for line in sys.stdin:
            asked = json.loads(line)
            number, name = asked.pop("id"), asked.pop("call")
            if name == "open":
                cluster = RayCluster(asked.pop("settings"))
                answers.carry_out(number, cluster.open, asked)
            else:
                pool.submit(answers.carry_out, number, getattr(cluster, name), asked)
        # A call that hangs holds nobody up: what it began is found by whoever looks next.
        os._exit(0)
