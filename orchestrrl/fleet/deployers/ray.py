"""Start and stop engines as actors of a Ray cluster, which an RL job may also use.

An engine has its own placement group, with a bundle on the planned node for each of its processes. Alternatively, it
uses bundles of a placement group that the job has reserved. Each bundle has a detached actor. The first actor of an
engine process runs the command line of the process. The number of a planned GPU determines only its node. Ray selects
the GPU on this node, and the engine gets the selection in `CUDA_VISIBLE_DEVICES`. The option `per_gpu` lists the
resources that are requested from Ray for each GPU, so that a cluster without GPUs can count another resource instead.

Sleeping engines keep their GPUs, and running engines cannot get more GPUs. The reason is that Ray assigns a bundle's
GPUs to an actor for the actor's lifetime, and cannot account for any other use of them.

`ray_cluster.py` calls Ray in a separate process, for three reasons: Ray terminates a driver process whose cluster is
lost, Ray's calls block, and the versions of Ray and Python must match the cluster's.
"""

import asyncio
import contextlib
import itertools
import json
import os
import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

from pydantic import Field, TypeAdapter, field_validator

from orchestrrl.core.addresses import http_url
from orchestrrl.core.clock import Clock
from orchestrrl.core.documents import Name, PositiveFloat, Section
from orchestrrl.core.errors import OutcomeUnknown, Permanent, Retryable
from orchestrrl.fleet.deployers import base
from orchestrrl.fleet.deployers.base import DeployedInstance, EngineLife, FixedGpusDeployer, FleetIdentity
from orchestrrl.fleet.deployers.command_line import EngineLaunch, EngineSpec, ports_to_try, render
from orchestrrl.fleet.deployers.layout_flags import NodeProcesses, shares
from planner.model import ConfigurationId, EngineId, GpuId

_SPEC: TypeAdapter[EngineSpec] = TypeAdapter(EngineSpec)
_ANYWHERE = ("0.0.0.0", "::", "")
RETRY_AFTER_S = 5.0
FOLDER = Path(__file__).parent
# Packages as bare folders: the interpreter needs neither OrchestrRL nor its dependencies.
RUN = """\
import sys, types
for name, folder in zip(("orchestrrl", "orchestrrl.fleet", "orchestrrl.fleet.deployers"), sys.argv[1:], strict=True):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [folder]
from orchestrrl.fleet.deployers.ray_cluster import main
main()
"""
LINE_BYTES = 64 * 1024 * 1024


class RayOptions(Section):
    """Options of the deployer `ray`."""

    # A running cluster: `auto` or HOST:PORT; default: RAY_ADDRESS, then auto. No cluster is started.
    address: Name | None = None
    namespace: Name | None = None  # of the actors; default: orchestrrl-FLEET
    per_gpu: dict[Name, PositiveFloat] = Field(default_factory=lambda: {"GPU": 1.0})
    # Names or patterns (rollout*) of groups that the job has reserved for engines; empty: each engine creates one.
    placement_groups: Annotated[tuple[Name, ...], Field(strict=False)] = ()
    # Ray's nodes, as IP addresses or host names, in the order of the fleet's GPUs; default: fleet.launch.nodes
    nodes: Annotated[tuple[Name, ...], Field(strict=False)] = ()
    python: Name | None = None  # with the cluster's versions of Python and Ray; default: OrchestrRL's own
    log_folder: Name = "/tmp/orchestrrl"  # on the engines' nodes: a folder for each namespace
    connect_within_s: PositiveFloat = 30.0
    start_within_s: PositiveFloat = 30.0  # for bundles and actors, not including the engine's own start-up
    answer_within_s: PositiveFloat = 10.0
    grace_s: PositiveFloat = 15.0  # between SIGTERM and SIGKILL

    @field_validator("per_gpu")
    @classmethod
    def _something_whole(cls, per_gpu: dict[str, float]) -> dict[str, float]:
        if not per_gpu:
            raise ValueError("must name at least one resource")
        if per_gpu.get("GPU", 1.0) != 1.0:
            raise ValueError("must set `GPU` to 1 or omit it")
        return per_gpu


class RayDeployer(FixedGpusDeployer):
    """Deploys one fleet's engines in a Ray cluster. The constructor raises ProblemFaults if `options` are invalid, and
    Permanent if Ray is not installed."""

    keeps_gpus = "Ray assigns them to the engine's actor for its lifetime"

    def __init__(self, launch: EngineLaunch, identity: FleetIdentity, options: Mapping[str, Any], clock: Clock) -> None:
        del clock  # Ray's time is real
        self._options = base.read_options(RayOptions, options)
        if self._options.python is None and find_spec("ray") is None:
            raise Permanent(
                "Ray is not installed; run `pip install 'orchestrrl[ray]'` or set `fleet.deployer.options.python`"
            )
        self._launch = launch
        self._driver = RayDriver(
            self._options.python or sys.executable,
            self._settings(identity),
            Path(identity.folder) / "ray-driver.log",
            self._options.connect_within_s,
        )
        self._poll_limit_s = 3 * self._options.answer_within_s
        # Grace, a sweep of nodes whose actors do not answer, and Ray's own time.
        self._stop_limit_s = self._options.grace_s + 4 * self._options.answer_within_s + 20.0
        self._turns: defaultdict[EngineId, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._starting: dict[EngineId, EngineSpec] = {}
        self._seen: dict[EngineId, DeployedInstance] = {}

    def _settings(self, identity: FleetIdentity) -> dict[str, Any]:
        chosen = self._options
        namespace = chosen.namespace or f"orchestrrl-{identity.name}"
        return chosen.model_dump(mode="json") | {
            "address": chosen.address or os.environ.get("RAY_ADDRESS") or "auto",
            "namespace": namespace,
            "nodes": list(chosen.nodes or self._launch.nodes),
            "log_folder": str(Path(chosen.log_folder) / quote(namespace, safe="")),
        }

    def check(self, spec: EngineSpec) -> None:
        self._parts(spec)

    async def start(self, spec: EngineSpec) -> DeployedInstance:
        parts = self._parts(spec)
        async with self._turns[spec.engine]:
            self._starting[spec.engine] = spec
            try:
                deployed = await self._start(spec, parts)
            except RayConnectionLost as error:
                raise OutcomeUnknown(
                    f"lost the connection to Ray during the start of engine {spec.engine}: {error}"
                ) from error
            finally:
                del self._starting[spec.engine]
        self._seen[spec.engine] = deployed
        return deployed

    async def _start(self, spec: EngineSpec, parts: list[dict[str, Any]]) -> DeployedInstance:
        host = self._launch.host
        held = await self._driver.call(
            "claim",
            # Without enough resources the claim is released again, which has its own limits.
            self._options.start_within_s + self._stop_limit_s,
            engine=spec.engine,
            spec=_SPEC.dump_python(spec, mode="json"),
            gpus=list(spec.gpus),
            parts=parts,
            host="0.0.0.0" if host in _ANYWHERE and host != "::" else host,
            ports=ports_to_try(spec, self._launch),
        )
        if "found" in held:
            return base.check_same(spec, _deployed(held["found"]))
        places = held["places"]
        address, port = places[0]["address"] if host in _ANYWHERE else host, places[0]["port"]
        lines = render(replace(spec, port=port), self._launch)
        state = await self._driver.call(
            "launch",
            2 * self._options.answer_within_s,
            engine=spec.engine,
            url=http_url(address, port),
            lines=[
                {"argv": line.argv, "environment": dict(line.environment), "gpus": place["gpus"]}
                for line, place in zip(lines, places, strict=True)
            ],
        )
        return _deployed(state)

    async def stop(self, engine: EngineId) -> None:
        # Takes no turn: a start in progress is abandoned.
        try:
            await self._driver.call("stop", self._stop_limit_s, engine=engine)
        except RayConnectionLost as error:
            raise OutcomeUnknown(f"lost the connection to Ray during the stop of engine {engine}: {error}") from error
        self._seen.pop(engine, None)

    async def status(self, engine: EngineId) -> DeployedInstance | None:
        try:
            found = await self._driver.call("state_of", self._poll_limit_s, engine=engine)
        except (RayConnectionLost, Retryable) as error:
            if engine in self._seen:
                return replace(self._seen[engine], life=EngineLife.UNKNOWN, detail=str(error))
            raise Retryable(f"cannot read the state of engine {engine}: {error}", RETRY_AFTER_S) from error
        if found is None:
            self._seen.pop(engine, None)
            return None
        return self._noted(found)

    async def list_engines(self) -> tuple[DeployedInstance, ...]:
        try:
            found = await self._driver.call("list_engines", self._poll_limit_s)
        except RayConnectionLost as error:
            raise Retryable(f"the connection to Ray was lost: {error}", RETRY_AFTER_S) from error
        self._seen.clear()
        return tuple(self._noted(state) for state in found)

    async def close(self) -> None:
        await self._driver.close()

    def _parts(self, spec: EngineSpec) -> list[dict[str, Any]]:
        """Return the parts of the engine's processes, in the format of ray_places.py. A part lists the GPUs that a
        process needs on one node. If the spec has no GPU numbers, the layout determines the number of GPUs. Raises
        ProblemFaults if the spec is invalid, and Permanent if a node has no address."""
        size, parts = self._launch.per_node, list[dict[str, Any]]()
        for process, line in enumerate(render(spec, self._launch)):
            anywhere = NodeProcesses(line.node, tuple(map(GpuId, range(spec.parallelism.gpus))))
            for node, gpus in shares(line.gpus, size) or (anywhere,):
                local = [gpu % size for gpu in gpus]
                parts.append({"process": process, "node": node, "local": local, "units": len(gpus)})
        nodes, last = self._options.nodes or self._launch.nodes, max(part["node"] for part in parts)
        if nodes and last >= len(nodes):
            known = ", ".join(nodes)
            raise Permanent(
                f"engine {spec.engine}: node {last} of the fleet has no address, because only these nodes are"
                f" configured: {known}; list all nodes in `fleet.deployer.options.nodes`"
            )
        return parts

    def _noted(self, state: Mapping[str, Any]) -> DeployedInstance:
        deployed = _deployed(state)
        if deployed.engine in self._starting:  # its start is in progress
            deployed = replace(deployed, url="", life=EngineLife.ALIVE, detail="")
        self._seen[deployed.engine] = deployed
        return deployed


def _deployed(state: Mapping[str, Any]) -> DeployedInstance:
    """Return the engine that `state`, a response of the driver process, describes. The result has no spec if the
    engine's record was lost because Ray's store was cleared."""
    record, engine, life = state["record"], EngineId(state["engine"]), EngineLife(state["life"])
    if record is None:
        return DeployedInstance(engine, ConfigurationId(""), (), life=life, detail=state["detail"])
    spec = _SPEC.validate_python(record["spec"])
    return DeployedInstance(engine, spec.configuration, spec.gpus, record["url"], life, state["detail"], spec)


class RayConnectionLost(Exception):
    """Raised if the driver process or the Ray cluster is lost, or if a call exceeds its time limit. The call may or may
    not have been carried out."""


_ERRORS = {"permanent": Permanent, "unknown": OutcomeUnknown, "lost": RayConnectionLost}


class RayDriver:
    """One connection of a fleet to its Ray cluster, through a process that runs `ray_cluster.py`.

    The first call starts the process. If the process is lost, the next call starts a new one. Every call has a time
    limit. The process is killed if it exceeds this limit, so that no call hangs. `settings` are passed to RayCluster.
    """

    def __init__(self, python: str, settings: Mapping[str, Any], log_path: Path, connect_within_s: float) -> None:
        self._python = python
        self._settings = settings
        self._log_path = log_path
        self._connect_within_s = connect_within_s
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._connecting = asyncio.Lock()

    async def call(self, name: str, limit_s: float, **arguments: Any) -> Any:
        """Call the method `name` of RayCluster in the driver process and return its result. Raises Retryable if no
        cluster can be reached, and RayConnectionLost if the cluster is lost or `limit_s` passes during the call. Also
        raises the errors that the driver process reports."""
        async with self._connecting:
            if self._process is None or self._process.returncode is not None:
                await self._connect()
        return await self._exchange(name, limit_s, arguments)

    async def close(self) -> None:
        """End the driver process. Ray's actors continue to run."""
        process, self._process = self._process, None
        reader, self._reader = self._reader, None
        if process is not None:
            if process.stdin is not None:
                process.stdin.close()
            try:
                await asyncio.wait_for(process.wait(), RETRY_AFTER_S)
            except TimeoutError:
                await _kill(process)
        if reader is not None:
            await reader

    async def _connect(self) -> None:
        await self.close()
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        with self._log_path.open("ab") as log:
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *(self._python, "-c", RUN, *map(str, (FOLDER.parents[1], FOLDER.parent, FOLDER))),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=log,
                    env={"RAY_USAGE_STATS_ENABLED": "0", **os.environ, "PYTHONUNBUFFERED": "1"},
                    start_new_session=True,  # Ctrl-C in the daemon's terminal must not reach it
                    limit=LINE_BYTES,
                )
            except OSError as error:
                raise Permanent(f"cannot run {self._python}: {error}") from error
        self._reader = asyncio.create_task(self._read(self._process))
        try:
            await self._exchange("open", self._connect_within_s, {"settings": dict(self._settings)})
        except RayConnectionLost as error:
            raise Retryable(f"cannot connect to Ray: {error}; see {self._log_path}", RETRY_AFTER_S) from error

    async def _exchange(self, name: str, limit_s: float, arguments: Mapping[str, Any]) -> Any:
        process, number = self._process, next(self._numbers)
        if process is None or process.stdin is None:
            raise RayConnectionLost("the Ray driver was closed")
        future = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            process.stdin.write(json.dumps({"id": number, "call": name, **arguments}).encode() + b"\n")
            await process.stdin.drain()
            answer = await asyncio.wait_for(future, limit_s)
        except TimeoutError:
            await _kill(process)
            raise RayConnectionLost(f"the call `{name}` timed out after {limit_s:g} s") from None
        except OSError as error:
            raise RayConnectionLost(f"the Ray driver has exited: {error}") from error
        finally:
            self._waiting.pop(number, None)
        if (refusal := answer.get("error")) is None:
            return answer["value"]
        kind, message = refusal["kind"], refusal["message"]
        raise Retryable(message, RETRY_AFTER_S) if kind == "retryable" else _ERRORS[kind](message)

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            answer = json.loads(line)
            future = self._waiting.get(answer["id"])
            if future is not None and not future.done():
                future.set_result(answer)
        await process.wait()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(RayConnectionLost(f"the Ray driver has exited with status {process.returncode}"))


async def _kill(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()
