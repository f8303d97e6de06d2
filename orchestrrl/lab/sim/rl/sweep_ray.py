"""Run the points of a sweep as tasks of a Ray cluster. OrchestrRL must be installed on its nodes, as here; results come
back over Ray and are written on this machine. A profile's file that a scenario names must lie at the same path there.
"""

import socket
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from orchestrrl.core.addresses import parse_address
from orchestrrl.core.errors import Permanent, ProblemFaults, Retryable
from orchestrrl.lab.sim.rl.results import parse, write
from orchestrrl.lab.sim.rl.sweep import SweepOutcome, SweepPoint
from orchestrrl.lab.sim.rl.sweep_workers import run_point

RETRY_AFTER_S = 10.0
CONNECT_S = 10.0


@dataclass(frozen=True, slots=True)
class OnRay:
    """`address`: `auto` or HOST:PORT of a cluster that runs. None is started."""

    address: str

    def __call__(self, points: Sequence[SweepPoint], folder: Path) -> Iterator[SweepOutcome]:
        if find_spec("ray") is None:
            raise Permanent("--ray needs ray: pip install 'orchestrrl[ray]'")
        _reach(self.address)
        import ray
        from ray.exceptions import RayError

        try:
            ray.init(address=self.address, namespace="orchestrrl-sim", log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
            raise Retryable(f"no Ray cluster at {self.address}: {error}", RETRY_AFTER_S) from error
        try:
            task = ray.remote(num_cpus=1, max_retries=2)(_text_of)
            running = {task.remote(point): point for point in points}
            while running:
                (told,), _ = ray.wait(list(running), num_returns=1)
                point = running.pop(told)
                try:
                    fault, text = ray.get(told)
                except RayError as error:
                    fault, text = f"{type(error).__name__}: {str(error).splitlines()[0]}", ""
                if not fault:
                    assert point.document is not None
                    write(folder, point.document, parse(text))
                yield SweepOutcome(point, fault)
        finally:
            ray.shutdown()  # which ends the tasks of this job


def _reach(address: str) -> None:
    """Ray itself tries for minutes where nobody listens."""
    if address == "auto":
        return
    try:
        host, port = parse_address(address)
    except ValueError as error:
        raise ProblemFaults([f"--ray: {error}, got {address!r}"]) from None
    try:
        socket.create_connection((host, port), CONNECT_S).close()
    except OSError as error:
        raise Retryable(f"no Ray cluster at {address}: {error}", RETRY_AFTER_S) from error


def _text_of(point: SweepPoint) -> tuple[str, str]:
    """What went wrong, and the point's file."""
    with tempfile.TemporaryDirectory(prefix="orchestrrl-sim-") as folder:
        fault = run_point(point, Path(folder))
        texts = [path.read_text(encoding="utf-8") for path in Path(folder).glob("*.json")]
    return fault, "".join(texts)
