"""Run engines as processes on this machine that outlive the daemon.

The deployer keeps no state in memory. Records on disk hold the intended state, and the machine's processes show the
actual state (see `local_machine.py`). Each change runs from start to end in one thread that holds the fleet's lock. No
other call, cancelled caller or second daemon of the fleet can interfere with it.
"""

import asyncio
import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from orchestrrl.core.clock import Clock
from orchestrrl.core.config.launch import EngineProduct
from orchestrrl.core.documents import NonNegativeInt, PositiveFloat, Section
from orchestrrl.core.errors import OutcomeUnknown, Permanent, ProblemFaults, Retryable
from orchestrrl.fleet.deployers import base, local_machine
from orchestrrl.fleet.deployers.base import DeployedInstance, EngineLife, FleetIdentity
from orchestrrl.fleet.deployers.command_line import EngineLaunch, EngineSpec, ports_to_try, render, url_of
from orchestrrl.fleet.deployers.local_machine import EngineLogs, EngineRecord, EngineRecords, FoundProcess
from orchestrrl.fleet.deployers.machine import hold_port
from planner.model import ConfigurationId, EngineId

T = TypeVar("T")

POLL_S = 0.05
FORCE_S = 10.0  # after SIGKILL: a process in a system call ends when the call returns
ROUNDS_OF_FORCE = 3
LATER_S = 1.0


class LocalOptions(Section):
    grace_s: PositiveFloat = 15.0  # between SIGTERM and SIGKILL
    logs_kept: NonNegativeInt = 3  # logs of earlier starts, per engine


@dataclass(frozen=True, slots=True)
class _Seen:
    """The record and processes of an engine. `record` is None if neither its file nor the environment of a process
    contains a record."""

    engine: EngineId
    record: EngineRecord | None
    found: tuple[FoundProcess, ...]

    @property
    def leaders(self) -> list[FoundProcess]:
        """The engine's living processes that a deployer started directly, without their child processes."""
        if self.record is None or not self.record.leaders:
            return [found for found in self.found if found.leads]
        return [found for found in self.found if any(found.is_same(leader) for leader in self.record.leaders)]

    @property
    def whole(self) -> bool:
        return len(self.leaders) >= (1 if self.record is None else self.record.processes)

    @property
    def cut_short(self) -> bool:
        """True if the engine's start or stop was interrupted because the daemon process that carried it out ended."""
        if self.record is None:
            return False
        return self.record.stopping or not (self.record.leaders or self.whole)


async def _until_ended(work: Callable[..., T], *arguments: Any) -> T:
    """Run `work` in a thread and wait until it has ended, even if the caller is cancelled. If the wait ended earlier,
    the thread would continue, and the next scan of the fleet would miss its changes."""
    working = asyncio.ensure_future(asyncio.to_thread(work, *arguments))
    try:
        return await asyncio.shield(working)
    finally:
        await asyncio.wait({working})


class LocalDeployer:
    """Implements `orchestrrl.fleet.deployers.base.Deployer` on this machine. It does not check which GPUs exist."""

    can_lend = True

    def __init__(self, launch: EngineLaunch, identity: FleetIdentity, options: Mapping[str, Any], clock: Clock) -> None:
        self._options = base.read_options(LocalOptions, options)
        self._launch = launch
        self._identity = identity
        self._clock = clock
        folder = Path(os.path.abspath(identity.folder))
        self._records = EngineRecords(folder)
        self._logs = EngineLogs(folder, self._options.logs_kept)
        self._stopping: Counter[EngineId] = Counter()
        self._exits: dict[tuple[int, float], int] = {}  # exit status of child processes, by leader

    def check(self, spec: EngineSpec) -> None:
        lines, faults = render(spec, self._launch), []
        nodes = sorted({line.node for line in lines})
        if nodes != [0] and self._launch.engine is not EngineProduct.SIMULATED:
            raise Permanent(f"the local deployer starts engines only on this machine: nodes must be [0], got {nodes}")
        if shutil.which(lines[0].argv[0]) is None:
            faults.append(f"fleet.launch.python: must be a program of this machine, got {lines[0].argv[0]!r}")
        if spec.weights and not Path(spec.weights).is_dir():
            faults.append(f"weights: must be a folder of this machine, got {spec.weights!r}")
        if faults:
            raise ProblemFaults(faults)

    async def start(self, spec: EngineSpec) -> DeployedInstance:
        return await _until_ended(self._start, spec)

    async def stop(self, engine: EngineId) -> None:
        self._stopping[engine] += 1
        try:
            asked = await asyncio.to_thread(self._signal, engine, signal.SIGTERM)
            await self._until_gone(asked, self._options.grace_s)
            for _ in range(ROUNDS_OF_FORCE):
                left = await asyncio.to_thread(self._signal, engine, signal.SIGKILL)
                if not left:
                    return
                await self._until_gone(left, FORCE_S)
        finally:
            self._stopping[engine] -= 1
        pids = [found.process.pid for found in left]
        raise OutcomeUnknown(f"processes {pids} of engine {engine} did not exit after SIGKILL")

    async def status(self, engine: EngineId) -> DeployedInstance | None:
        running = await asyncio.to_thread(self._running, engine)
        if running is not None:
            return running
        return next((each for each in await self.list_engines() if each.engine == engine), None)

    async def list_engines(self) -> tuple[DeployedInstance, ...]:
        return await asyncio.to_thread(self._list)

    async def lend(self, engine: EngineId, lent: bool) -> None:
        await _until_ended(self._lend, engine, lent)

    @property
    def can_scale(self) -> bool:
        """True if engines can be scaled. Simulated engines can always be scaled. A vLLM server can be scaled only if
        Ray places its replicas; this case has not been tested, because it needs GPUs."""
        words = self._launch.arguments
        by_ray = ("--data-parallel-backend", "ray") in pairwise(words) or "--data-parallel-backend=ray" in words
        return self._launch.engine is EngineProduct.SIMULATED or by_ray

    async def scale(self, spec: EngineSpec) -> DeployedInstance:
        return await _until_ended(self._scale, spec)

    async def close(self) -> None:
        """Do nothing, because the deployer holds no resources."""

    # The methods below run in threads.

    def _start(self, spec: EngineSpec) -> DeployedInstance:
        self.check(spec)
        try:
            with self._records.alone():
                seen = self._scan()
                held = seen.get(spec.engine)
                if held is not None and self._stopping[spec.engine]:
                    raise Retryable(f"engine {spec.engine} cannot be started yet: it is being stopped", LATER_S)
                if held is not None and not held.cut_short:
                    there = base.check_same(spec, self._deployed(held))
                    if held.record is None or held.record.leaders:
                        return there
                    # An interrupted start whose processes all exist counts as a start.
                    leaders = tuple(each.identity for each in held.found if each.leads)
                    return self._deployed(self._noted(replace(held.record, leaders=leaders), held.found))
                self._check_gpus(spec, seen)
                if held is not None:
                    self._clear(held)
                return self._deployed(self._spawn(spec))
        except OSError as error:
            raise Retryable(f"engine {spec.engine} cannot be started: {error}", LATER_S) from error

    def _check_gpus(self, spec: EngineSpec, seen: Mapping[EngineId, _Seen]) -> None:
        records = [each.record for each in seen.values() if each.record is not None and not each.record.lent]
        base.check_free(spec.engine, spec.gpus, {each.spec.engine: each.spec.gpus for each in records})

    def _clear(self, held: _Seen) -> None:
        """Kill the processes that an interrupted start or stop has left behind. Raises Retryable if the processes do
        not end within FORCE_S seconds."""
        deadline_s = time.monotonic() + FORCE_S
        found = held.found
        while found:
            for each in found:
                each.signal(signal.SIGKILL)
            time.sleep(POLL_S)
            found = self._processes_of(held.engine)
            if found and time.monotonic() > deadline_s:
                raise Retryable(f"the remaining processes of engine {held.engine} did not exit after SIGKILL", FORCE_S)

    def _exit_status(self, leader: tuple[int, float]) -> int | None:
        """Return the exit status of a child process, identified by its id and creation time. Return None if the process
        still runs or is not a child of this process. The status is collected once and kept, because the process id may
        be reused later."""
        if leader not in self._exits and (status := local_machine.exit_status(leader[0])) is not None:
            self._exits[leader] = status
        return self._exits.get(leader)

    def _spawn(self, spec: EngineSpec) -> _Seen:
        try:
            holder = hold_port(self._launch.host, ports_to_try(spec, self._launch))
        except OSError as error:
            raise Retryable(f"engine {spec.engine}: no free port on {self._launch.host}: {error}", LATER_S) from error
        with holder:
            placed = replace(spec, port=holder.getsockname()[1])
            lines = render(placed, self._launch)
            record = EngineRecord(spec, url_of(placed, self._launch), len(lines))
            self._records.write(record)
            log, spawned = self._logs.rotate(spec.engine), []
            try:
                for line in lines:
                    spawned.append(local_machine.spawn(line, self._fleet, record, log, holder.fileno()))
            except OSError as error:
                self._clear(_Seen(spec.engine, record, self._processes_of(spec.engine)))
                self._records.remove(spec.engine)
                raise Permanent(f"engine {spec.engine}: cannot run {lines[0].argv[0]}: {error.strerror}") from error
        return self._noted(replace(record, leaders=tuple(spawned)), self._processes_of(spec.engine))

    def _noted(self, record: EngineRecord, found: Sequence[FoundProcess]) -> _Seen:
        self._records.write(record)
        return _Seen(record.spec.engine, record, tuple(found))

    def _signal(self, engine: EngineId, number: signal.Signals) -> tuple[FoundProcess, ...]:
        """Signal all remaining processes of an engine and return them. The engine's record is marked as stopping. If no
        processes remain, the record is removed."""
        with self._records.alone():
            held = self._scan().get(engine)
            if held is None:
                return ()
            if not held.found:
                for leader in held.record.leaders if held.record is not None else ():
                    self._exit_status(leader)
                    self._exits.pop(leader, None)
                self._records.remove(engine)
                return ()
            if held.record is not None and not held.record.stopping:
                self._records.write(replace(held.record, stopping=True))
            for found in held.found:
                found.signal(number)
            return held.found

    async def _until_gone(self, processes: Sequence[FoundProcess], within_s: float) -> None:
        deadline_s = self._clock.now_s() + within_s
        while any(local_machine.is_alive(found.identity) for found in processes) and self._clock.now_s() < deadline_s:
            await self._clock.sleep(POLL_S)

    def _running(self, engine: EngineId) -> DeployedInstance | None:
        """Return the engine if its record and its recorded processes show that it runs, without a scan of all processes
        of the machine. Return None if a scan is needed."""
        record = self._records.read_one(engine)
        if record is None or record.stopping or not record.leaders:
            return None
        return _instance_of(record) if all(map(local_machine.is_alive, record.leaders)) else None

    def _list(self) -> tuple[DeployedInstance, ...]:
        with self._records.alone():
            seen = self._scan()
        return tuple(self._deployed(seen[engine]) for engine in sorted(seen))

    def _lend(self, engine: EngineId, lent: bool) -> None:
        with self._records.alone():
            seen = self._scan()
            held = seen.get(engine)
            if held is None or held.record is None:
                raise Permanent(f"engine {engine} cannot lend its GPUs: the deployer has no record of it")
            if not lent:
                self._check_gpus(held.record.spec, seen)
            if held.record.lent != lent:
                self._records.write(replace(held.record, lent=lent))

    def _scale(self, spec: EngineSpec) -> DeployedInstance:
        if not self.can_scale:
            raise Permanent(f"engine {spec.engine} cannot be scaled: it keeps the GPUs that it was started with")
        with self._records.alone():
            seen = self._scan()
            held = seen.get(spec.engine)
            if held is None or held.record is None or held.cut_short:
                raise Permanent(f"engine {spec.engine} cannot be scaled: it is not running")
            self._check_gpus(spec, seen)
            return self._deployed(self._noted(replace(held.record, spec=spec), held.found))

    @property
    def _fleet(self) -> str:
        """The value that marks this fleet's processes. It contains the folder, which distinguishes fleets of the same
        name."""
        return f"{self._identity.name} in {os.path.realpath(self._identity.folder)}"

    def _processes_of(self, engine: EngineId) -> tuple[FoundProcess, ...]:
        return tuple(local_machine.find_processes(self._fleet, self._logs).get(engine, ()))

    def _scan(self) -> dict[EngineId, _Seen]:
        records, found = self._records.read(), local_machine.find_processes(self._fleet, self._logs)
        seen = {}
        for engine in sorted({*records, *found}):
            processes = tuple(found.get(engine, ()))
            recorded = (each.record for each in processes if each.record is not None)
            seen[engine] = _Seen(engine, records.get(engine) or next(recorded, None), processes)
        return seen

    def _deployed(self, seen: _Seen) -> DeployedInstance:
        record, alive = seen.record, seen.whole
        if record is None:
            detail = f"its record was lost; {self._logs.tail(seen.engine)}"
            life = EngineLife.ALIVE if alive else EngineLife.ENDED
            return DeployedInstance(seen.engine, ConfigurationId(""), (), life=life, detail=detail)
        return _instance_of(record) if alive else _instance_of(record, EngineLife.ENDED, self._obituary(seen, record))

    def _obituary(self, seen: _Seen, record: EngineRecord) -> str:
        living = {found.process.pid for found in seen.leaders}
        gone = [leader for leader in record.leaders if leader[0] not in living]
        ends = [f"process {leader[0]} {_how(self._exit_status(leader))}" for leader in gone]
        if seen.cut_short:
            what = "is being stopped" if record.stopping else "was not fully started"
            ends.append(f"it {what}: {len(living)} of {record.processes} processes exist")
        return f"{', '.join(ends)}; {self._logs.tail(seen.engine)}"


def _instance_of(record: EngineRecord, life: EngineLife = EngineLife.ALIVE, detail: str = "") -> DeployedInstance:
    spec = record.spec
    return DeployedInstance(spec.engine, spec.configuration, spec.gpus, record.url, life, detail, spec, record.lent)


def _how(status: int | None) -> str:
    if status is None:
        return "has ended"
    return f"ended with status {status}" if status >= 0 else f"was ended by {signal.Signals(-status).name}"
