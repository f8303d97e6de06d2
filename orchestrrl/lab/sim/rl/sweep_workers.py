"""Run the points of a sweep in processes of this machine, or as tasks of a Ray cluster.

Each point has a process of its own: a crash affects that point alone, and all processes end with their parent. On Ray,
OrchestrRL must be installed on the cluster's nodes; results come back over Ray and are written on this machine. A
profile's file that a scenario names must lie at the same path there.
"""

import multiprocessing
import os
import signal
import socket
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from orchestrrl.core.addresses import parse_address
from orchestrrl.core.errors import OrchestrRLError, Permanent, ProblemFaults, Retryable
from orchestrrl.lab.sim.rl.results import parse, write
from orchestrrl.lab.sim.rl.sweep import SweepOutcome, SweepPoint

GRACE_S = 5.0


def run_point(point: SweepPoint, folder: Path) -> str:
    """Write its results. Returns what went wrong, nothing where all is well."""
    from orchestrrl.lab.sim.rl.results import write
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
    """`at_once` of them; by default as many as there are cores for us. `work`: what each does."""

    at_once: int | None = None
    work: Callable[[SweepPoint, Path], str] = run_point

    def __call__(self, points: Sequence[SweepPoint], folder: Path) -> Iterator[SweepOutcome]:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["orchestrrl.lab.sim.rl.run"])
        most = self.at_once or len(os.sched_getaffinity(0))
        waiting, running = list(reversed(points)), dict[BaseProcess, tuple[SweepPoint, Connection]]()
        try:
            while waiting or running:
                while waiting and len(running) < most:
                    point = waiting.pop()
                    ours, theirs = context.Pipe(duplex=False)
                    process: BaseProcess = context.Process(
                        target=_work, args=(self.work, point, folder, theirs), daemon=True
                    )
                    process.start()
                    theirs.close()
                    running[process] = point, ours
                # A pipe is readable when its process has told its outcome, or is gone.
                told = wait([pipe for _, pipe in running.values()])
                for process in [each for each, (_, pipe) in running.items() if pipe in told]:
                    point, pipe = running.pop(process)
                    yield SweepOutcome(point, _outcome(process, pipe))
        finally:
            _end(list(running))


def _work(work: Callable[[SweepPoint, Path], str], point: SweepPoint, folder: Path, outcome_pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for whoever started us, who ends us
    threading.Thread(target=_end_with_parent, daemon=True).start()
    outcome_pipe.send(work(point, folder))


def _end_with_parent() -> None:
    """Also where it was killed, or interrupted before it knew of us."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _outcome(process: BaseProcess, pipe: Connection) -> str:
    try:
        fault = str(pipe.recv())
    except EOFError:
        process.join()
        fault = f"its process ended with status {process.exitcode}"
    pipe.close()
    process.join()
    return fault


def _end(running: Sequence[BaseProcess]) -> None:
    for process in running:
        process.terminate()
    for process in running:
        process.join(GRACE_S)
        if process.is_alive():
            process.kill()
            process.join()


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
