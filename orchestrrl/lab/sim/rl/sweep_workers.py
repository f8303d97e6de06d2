"""Run the points of a sweep in processes of this machine, or as tasks of a Ray cluster.

On Ray, OrchestrRL must be installed on the cluster's nodes; results come back over Ray and are written on this machine.
A profile's file that a scenario names must lie at the same path there.
"""

import socket
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from orchestrrl.core.addresses import parse_address
from orchestrrl.core.errors import OrchestrRLError, Permanent, ProblemFaults, Retryable
from orchestrrl.lab.processes import run_tasks
from orchestrrl.lab.sim.rl.results import parse, write
from orchestrrl.lab.sim.rl.sweep import SweepOutcome, SweepPoint


def run_point(point: SweepPoint, folder: Path) -> str:
    """Write its results. Returns what went wrong, nothing where all is well."""
    from orchestrrl.lab.sim.rl.run import run_cluster
    from orchestrrl.lab.sim.rl.scenario_file import scenario_of

    assert point.document is not None
    try:
        scenario = scenario_of(dict(point.document), point.folder)
        write(folder, point.document, run_cluster(scenario))
    except (OrchestrRLError, ProblemFaults, OSError) as error:
        return str(error)
    except Exception as error:  # noqa: BLE001  a defect of ours at one point is told, and the rest goes on
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
    return ""


@dataclass(frozen=True, slots=True)
class Processes:
    """`at_once` of them; by default as many as there are cores for us."""

    at_once: int | None = None

    def __call__(self, points: Sequence[SweepPoint], folder: Path) -> Iterator[SweepOutcome]:
        work = partial(run_point, folder=folder)
        for point, fault in run_tasks(work, points, self.at_once, ["orchestrrl.lab.sim.rl.run"]):
            yield SweepOutcome(point, str(fault))


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
