"""Run engines on Kubernetes: each engine as one Deployment, or as one LeaderWorkerSet if it spans several nodes.

All state is in the cluster. The objects with a fleet's label are its engines, and annotations hold their specs.
`kubernetes_objects.py` renders the objects, and `kubernetes_view.py` reads them.

An engine is reached at the address of its pod, without a Service. A pod is never replaced by another pod (see
`kubernetes_objects.py`), so a Service would only be one more object that could be left behind.

The fleet's GPU numbers do not identify devices. Kubernetes only counts a node's GPUs, and its device plugin selects the
GPUs of each pod. The deployer ensures that no GPU serves two engines by comparing the fleet's GPU numbers in the
objects' annotations. An engine's object exists before its first process runs, so that every daemon of the fleet can
detect a conflict in time.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from orchestrrl.core.addresses import http_url
from orchestrrl.core.clock import Clock
from orchestrrl.core.errors import OrchestrRLError, OutcomeUnknown, Permanent, Retryable
from orchestrrl.fleet.deployers import base
from orchestrrl.fleet.deployers import kubernetes_objects as objects
from orchestrrl.fleet.deployers import kubernetes_view as reading
from orchestrrl.fleet.deployers.base import DeployedInstance, EngineLife, FixedGpusDeployer, FleetIdentity
from orchestrrl.fleet.deployers.command_line import EngineLaunch, EngineSpec
from orchestrrl.fleet.deployers.kubernetes_api import KubernetesApi, ResourceConflict, ResourceNotFound
from orchestrrl.fleet.deployers.kubernetes_objects import KubernetesOptions, Object
from orchestrrl.fleet.deployers.kubernetes_view import FleetView, Found, LogPlace
from planner.model import EngineId, GpuId

INSTALL_LWS = (
    "an engine over several nodes needs LeaderWorkerSet, which this cluster does not have: "
    "https://lws.sigs.k8s.io/docs/installation/"
)
RETRY_AFTER_S = 1.0
NODES_KNOWN_POLLS = 10


class KubernetesDeployer(FixedGpusDeployer):
    """Deploys one fleet's engines in one namespace. Labels with the fleet's name identify its engines."""

    keeps_gpus = "Kubernetes assigns them to a pod for its lifetime"

    def __init__(self, launch: EngineLaunch, identity: FleetIdentity, options: Mapping[str, Any], clock: Clock) -> None:
        self._launch = launch
        self._fleet = identity.name
        self._options = base.read_options(KubernetesOptions, options)
        self._clock = clock
        self._api = KubernetesApi(self._options.kubeconfig, self._options.context, self._options.request_timeout_s)
        nodes_known_s = self._options.poll_s * NODES_KNOWN_POLLS if self._options.read_nodes else None
        self._view = FleetView(self._api, self._options.namespace, self._fleet, nodes_known_s, clock)
        self._pods = reading.pods_path(self._options.namespace)
        self._making: list[EngineSpec] = []  # being created; not visible in the cluster yet

    def check(self, spec: EngineSpec) -> None:
        objects.workload(spec, self._launch, self._options, self._fleet)

    async def start(self, spec: EngineSpec) -> DeployedInstance:
        wanted = objects.workload(spec, self._launch, self._options, self._fleet)
        base.check_free(spec.engine, spec.gpus, {other.engine: other.gpus for other in self._making})
        self._making.append(spec)
        try:
            await self._make(spec, wanted)
        finally:
            self._making.remove(spec)
        return await self._bring_up(spec.engine)

    async def stop(self, engine: EngineId) -> None:
        deadline_s = self._clock.now_s() + self._options.grace_s + self._options.stop_within_s
        asked: set[str] = set()
        while True:
            with _begun(bool(asked), f"stopping engine {engine}"):
                made, pods = await self._view.find(objects.name_of(self._fleet, engine))
                if made is None and not pods:
                    return
                await self._request_deletion(made, pods, asked)
            if self._clock.now_s() > deadline_s:
                found = reading.read_life(made, pods, await self._view.answering(pods))
                raise OutcomeUnknown(f"engine {engine} still exists: {found.detail or 'its pods have not terminated'}")
            await self._clock.sleep(self._options.poll_s)

    async def status(self, engine: EngineId) -> DeployedInstance | None:
        made, pods = await self._view.find(objects.name_of(self._fleet, engine))
        if made is None and not pods:
            return None
        return await self._deployed(made, pods, await self._view.answering(pods))

    async def list_engines(self) -> tuple[DeployedInstance, ...]:
        everyone = (await self._view.all()).values()
        answering = await self._view.answering([pod for _, pods in everyone for pod in pods])
        found = [await self._deployed(made, pods, answering) for made, pods in everyone]
        return tuple(sorted(found, key=lambda deployed: deployed.engine))

    async def close(self) -> None:
        await self._api.close()

    # Starting.

    async def _make(self, spec: EngineSpec, wanted: Object) -> None:
        """Create the engine's object unless it exists. Raises Permanent if the object exists with another spec, another
        engine holds one of the GPUs, or the object's namespace or kind does not exist. Raises Retryable if the previous
        object of the engine is still being removed."""
        everyone = await self._view.all()
        name = wanted["metadata"]["name"]
        made, pods = everyone.pop(name, (None, []))
        if made is not None and not reading.deleting(made):
            base.check_same(spec, objects.instance_of(made))
            return
        if made is not None or pods:
            raise Retryable(f"engine {spec.engine} cannot be started yet: it is still being removed", RETRY_AFTER_S)
        base.check_free(spec.engine, spec.gpus, _gpus_by_engine(everyone))
        kind = reading.workloads_path(self._options.namespace, wanted["apiVersion"])
        try:
            await self._api.create(kind, wanted)
        except ResourceConflict:
            # Another daemon of this fleet created it, or the answer to an earlier request was lost.
            base.check_same(spec, objects.instance_of(await self._api.get(f"{kind}/{name}")))
        except ResourceNotFound as error:
            raise Permanent(INSTALL_LWS if "namespaces" not in str(error) else str(error)) from error

    async def _bring_up(self, engine: EngineId) -> DeployedInstance:
        """Open the scheduling gates of the engine's first pods, and wait until all of their containers run or one has
        ended. If the engine cannot run, stop it and raise the error.

        The caller limits the time for pulling images. If the caller cancels the call, the start continues in the
        cluster, and the next call of `start` waits for it.
        """
        with _begun(begun=True, what=f"starting engine {engine}"):
            up = await self._until_it_runs(engine)
        if isinstance(up, DeployedInstance):
            return up
        # It has never run. For the caller nothing was changed.
        await self.stop(engine)
        raise up

    async def _until_it_runs(self, engine: EngineId) -> DeployedInstance | Retryable | Permanent:
        """Wait until the engine runs or has ended, and return its state. Return the error Retryable, without raising
        it, if the engine's pods cannot be scheduled now. Return the error Permanent if the pods can never run. Raises
        Permanent if the engine is stopped during the wait."""
        waiting_since_s: float | None = None
        while True:
            everyone = await self._view.all()
            made, pods = everyone.get(objects.name_of(self._fleet, engine), (None, []))
            if made is None or reading.deleting(made):
                raise Permanent(f"engine {engine} was stopped before it was ready")
            # Two daemons may have created engines for one GPU: the one that sees this before its engine ran withdraws.
            if not reading.uids(made):
                held = _gpus_by_engine(everyone)
                try:
                    base.check_free(engine, held[engine], held)
                except Permanent as clash:
                    return clash
            refused = reading.cannot_be_made(made)
            if refused and not pods:
                return self._no_room(engine, refused) if "exceeded quota" in refused else Permanent(refused)
            await self._let_through(made, pods)
            answering = await self._view.answering(pods)
            read = reading.read_life(made, pods, answering)
            if read.life is not EngineLife.ALIVE or read.running:
                return await self._deployed(made, pods, answering)
            if not read.no_room:
                waiting_since_s = None
            elif waiting_since_s is None:
                waiting_since_s = self._clock.now_s()
            elif self._clock.now_s() - waiting_since_s > self._options.schedule_within_s:
                return self._no_room(engine, read.detail)
            await self._clock.sleep(self._options.poll_s)

    def _no_room(self, engine: EngineId, why: str) -> Retryable:
        return Retryable(f"not enough resources for engine {engine}: {why}", self._options.schedule_within_s)

    async def _let_through(self, made: Object, pods: Sequence[Object]) -> None:
        """Once all of the workload's first pods exist, record them in the workload, and then open their scheduling
        gates. Because of this order, a pod that is not recorded has never run. Objects that have changed since they
        were read are not changed, and the caller polls again."""
        first = [pod for pod in pods if not reading.deleting(pod)]
        if reading.uids(made):
            await self._open_gates(made, pods)
        elif len(first) >= objects.size_of(made):
            written = " ".join(sorted(pod["metadata"]["uid"] for pod in first))
            mark = {"resourceVersion": made["metadata"]["resourceVersion"], "annotations": {objects.PODS: written}}
            with contextlib.suppress(ResourceConflict, ResourceNotFound):
                await self._open_gates(await self._api.patch(self._path_of(made), {"metadata": mark}), pods)

    async def _open_gates(self, made: Object, pods: Sequence[Object]) -> None:
        for pod in reading.let_through(made, pods):
            others = [gate for gate in reading.gates(pod) if gate["name"] != objects.GATE]
            if len(others) == len(reading.gates(pod)):
                continue
            version = {"resourceVersion": pod["metadata"]["resourceVersion"]}
            opened = {"metadata": version, "spec": {"schedulingGates": others or None}}
            with contextlib.suppress(ResourceConflict, ResourceNotFound):
                await self._api.patch(f"{self._pods}/{pod['metadata']['name']}", opened)

    # Stopping.

    async def _request_deletion(self, made: Object | None, pods: Sequence[Object], asked: set[str]) -> None:
        """Delete the workload, which deletes its pods. If the workload does not exist, delete the pods themselves.
        `asked` contains the uids of objects whose deletion was requested; these objects, and objects that are already
        being deleted, are skipped."""
        goes = [(self._path_of(made), made)] if made is not None else []
        if made is None:
            goes = [(f"{self._pods}/{pod['metadata']['name']}", pod) for pod in pods]
        for path, one in goes:
            uid = one["metadata"]["uid"]
            if reading.deleting(one) or uid in asked:
                continue
            order = {"kind": "DeleteOptions", "apiVersion": "v1", "preconditions": {"uid": uid}}
            # It may be gone, with another object under its name.
            with contextlib.suppress(ResourceNotFound, ResourceConflict):
                await self._api.delete(path, {**order, "propagationPolicy": "Foreground"})
            asked.add(uid)

    # Reading.

    async def _deployed(
        self, made: Object | None, pods: Sequence[Object], answering: Mapping[str, bool]
    ) -> DeployedInstance:
        source = made if made is not None else pods[0]
        read = reading.read_life(made, pods, answering)
        port = objects.annotation(source, objects.PORT)
        return replace(
            objects.instance_of(source),
            url=http_url(read.address, port) if read.address and port else "",
            life=read.life,
            detail=f"{read.detail}{await self._last_log_lines(read.log)}" if read.log is not None else read.detail,
        )

    async def _last_log_lines(self, place: LogPlace) -> str:
        query = {
            "container": place.container,
            "tailLines": str(self._options.log_lines),
            "previous": str(place.previous).lower(),
        }
        try:
            words = await self._api.text(f"{self._pods}/{place.pod}/log", query)
        except OrchestrRLError as error:
            return f"; its log cannot be read ({error}); its status message:\n{place.message}"
        return f"; the end of its log:\n{words.rstrip() or place.message}"

    def _path_of(self, made: Object) -> str:
        return f"{reading.workloads_path(self._options.namespace, made['apiVersion'])}/{made['metadata']['name']}"


@contextlib.contextmanager
def _begun(begun: bool, what: str) -> Iterator[None]:
    """Convert a Retryable error in the block into OutcomeUnknown if `begun` is True, because the change may have been
    made already. `what` describes the change in the message."""
    try:
        yield
    except Retryable as error:
        raise (OutcomeUnknown(f"{what} has begun: {error}") if begun else error) from error


def _gpus_by_engine(everyone: Mapping[str, Found]) -> dict[EngineId, tuple[GpuId, ...]]:
    """Return the GPUs of each engine, as recorded in the annotations of its workload or, if the workload is gone, of
    its pods."""
    engines = [objects.instance_of(made or pods[0]) for made, pods in everyone.values()]
    return {each.engine: each.gpus for each in engines}
