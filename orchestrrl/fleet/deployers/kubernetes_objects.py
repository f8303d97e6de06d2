"""Render an engine's command lines as a Kubernetes object, a Deployment or a LeaderWorkerSet, without side effects.

Each engine is one object, so that a start is one atomic request. An engine on one node is a Deployment of one pod. An
engine over several nodes is a LeaderWorkerSet of one group, whose leader serves requests.

A pod runs only once. Kubernetes would restart a container that has ended, because a Deployment's pods allow no
restartPolicy other than Always. It would also replace an evicted pod. The new container or pod would answer at the
engine's address with outdated weights and without the requests of the old one. Therefore, the first command of a
container refuses to run twice in its pod. In addition, a pod has a scheduling gate, which the deployer removes only
from the engine's first pods.
"""

import hashlib
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import Field, TypeAdapter, ValidationError, ValidationInfo, field_validator

from orchestrrl.core.config.launch import EngineDevice, EngineProduct
from orchestrrl.core.documents import Name, NonNegativeInt, PositiveFloat, PositiveInt, Section
from orchestrrl.core.errors import ProblemFaults
from orchestrrl.fleet.deployers.base import DeployedInstance
from orchestrrl.fleet.deployers.command_line import CommandLine, EngineLaunch, EngineSpec, render, url_of
from orchestrrl.fleet.deployers.layout_flags import ProcessRole
from planner.model import ConfigurationId, EngineId, GpuId

Names = Annotated[tuple[Name, ...], Field(strict=False)]

# Fields that the deployer sets in every pod and relies on; a template must not set them.
OURS = ("restartPolicy", "schedulingGates", "terminationGracePeriodSeconds")


class KubernetesOptions(Section):
    """Options of the deployer `kubernetes`, named as in Kubernetes. Times are in seconds. Other fields of pods can be
    set in `pod_template`."""

    image: Name  # must contain vLLM and a shell
    namespace: Name = "default"
    # Names of nodes in the order of the fleet's GPUs, per_node each; empty: Kubernetes chooses nodes.
    nodes: Names = ()
    kubeconfig: Name | None = None  # a file; None: the service account of the pod that the daemon runs in
    context: Name | None = None  # of the kubeconfig; None: its current one
    gpu_resource: Name = "nvidia.com/gpu"
    service_account: Name | None = None
    image_pull_secrets: Names = ()
    node_selector: dict[Name, str] = Field(default_factory=dict)
    tolerations: Annotated[tuple[dict[str, Any], ...], Field(strict=False)] = ()
    volumes: Annotated[tuple[dict[str, Any], ...], Field(strict=False)] = ()  # as in a pod's spec
    volume_mounts: Annotated[tuple[dict[str, Any], ...], Field(strict=False)] = ()  # of every container
    environment_from: Annotated[tuple[dict[str, Any], ...], Field(strict=False)] = ()  # secrets, as in `envFrom`
    shm_size: Name | None = "8Gi"  # of /dev/shm, which vLLM's processes use; null: the node's default
    pod_template: dict[str, Any] = Field(default_factory=dict)  # `metadata` and `spec` that are merged into each pod
    grace_s: PositiveInt = 10  # before a stopped engine is killed
    schedule_within_s: PositiveFloat = 30.0  # how long a pod may be unschedulable before its start fails
    stop_within_s: PositiveFloat = 120.0  # beyond grace_s; then the outcome is unknown
    request_timeout_s: PositiveFloat = 10.0
    poll_s: PositiveFloat = 0.5
    log_lines: NonNegativeInt = 40  # of an ended engine, to show
    read_nodes: bool = True  # a cluster permission; if False, a lost node is noticed when its pods are evicted

    @field_validator("context")
    @classmethod
    def _of_a_kubeconfig(cls, context: str | None, given: ValidationInfo) -> str | None:
        if context is not None and given.data.get("kubeconfig", "") is None:
            raise ValueError("must not be set without options.kubeconfig")
        return context

    @field_validator("nodes")
    @classmethod
    def _different(cls, nodes: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(nodes)) != len(nodes):
            raise ValueError("must not contain duplicates")
        return nodes

    @field_validator("pod_template")
    @classmethod
    def _not_what_is_ours(cls, template: dict[str, Any]) -> dict[str, Any]:
        unknown = sorted(set(template) - {"metadata", "spec"})
        if unknown:
            raise ValueError(f"must contain only `metadata` and `spec`, not {', '.join(unknown)}")
        if not all(isinstance(part, dict) for part in template.values()):
            raise ValueError("`metadata` and `spec` must be objects")
        taken = [name for name in OURS if name in template.get("spec", {})]
        if taken:
            raise ValueError(f"must not set {', '.join(taken)}, which the deployer sets")
        return template


Object = dict[str, Any]

FLEET, ENGINE = "orchestrrl/fleet", "orchestrrl/engine"  # labels: names derived from ids
FLEET_NAME, ENGINE_ID = "orchestrrl/fleet-name", "orchestrrl/engine-id"  # annotations: the ids themselves
CONFIGURATION, GPUS, SPEC = "orchestrrl/configuration", "orchestrrl/gpus", "orchestrrl/spec"
PORT, PODS = "orchestrrl/port", "orchestrrl/pods"  # uids of the pods whose gates were opened
GATE = "orchestrrl/first-pod"
HOSTNAME = "kubernetes.io/hostname"
LWS = "leaderworkerset.x-k8s.io/v1"
WORKER_INDEX = "leaderworkerset.sigs.k8s.io/worker-index"
# Expanded by Kubernetes; LeaderWorkerSet sets it in each of its containers.
LEADER = "$(LWS_LEADER_ADDRESS)"

RUNS_FOLDER = "/var/run/orchestrrl"
# Waiting instead of exiting keeps the log of the run that ended: Kubernetes only keeps the previous run's.
_ONCE = """\
if [ -d "$ORCHESTRRL_RUN" ]; then
  echo 'OrchestrRL: this engine has ended, and is not started again in its pod'
  trap 'exit 0' TERM
  while :; do sleep 60 & wait $!; done
fi
mkdir "$ORCHESTRRL_RUN" || exit 75
"""
_PINNED = ("CUDA_VISIBLE_DEVICES", "VLLM_CPU_OMP_THREADS_BIND")
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_SPEC: TypeAdapter[EngineSpec] = TypeAdapter(EngineSpec)


def name_of(*ids: str) -> str:
    """Return a DNS label (RFC 1035) for arbitrary ids. It consists of a readable part of the last id and a digest of
    all ids. The label leaves room for the suffixes that Deployments and LeaderWorkerSets append."""
    readable = re.sub(r"[^a-z0-9]+", "-", ids[-1].lower())[:20].strip("-")
    digest = hashlib.sha256("\0".join(ids).encode()).hexdigest()[:12]
    return "-".join(part for part in ("orl", readable, digest) if part)


def selector(fleet: str) -> str:
    """Return the label selector that matches all objects of a fleet."""
    return f"{FLEET}={name_of(fleet)}"


def workload(spec: EngineSpec, launch: EngineLaunch, options: KubernetesOptions, fleet: str) -> Object:
    """Return the Kubernetes object of an engine. Raises ProblemFaults with every fault of the spec and the options."""
    # A pod has an address of its own, which is unknown before the pod exists.
    host = "0.0.0.0" if launch.host in _LOOPBACK else launch.host
    launch = replace(launch, host=host, nodes=(LEADER,) * (1 + max(spec.gpus, default=0) // launch.per_node))
    lines = render(spec, launch)
    nodes = sorted({line.node for line in lines})
    faults = _faults(spec.engine, lines, nodes, options)
    if faults:
        raise ProblemFaults(faults)
    name = name_of(fleet, spec.engine)
    annotations = _annotations(spec, launch, fleet)
    labels = {FLEET: name_of(fleet), ENGINE: name}
    metadata = {"name": name, "labels": labels, "annotations": annotations}
    by_node = {node: [line for line in lines if line.node == node] for node in nodes}
    marks = {"labels": labels, "annotations": {ENGINE_ID: spec.engine, GPUS: annotations[GPUS]}}

    def template(holders: Sequence[int]) -> Object:
        """Return the template of the pods on these nodes. All of these pods are identical."""
        containers = [
            _container(place, [by_node[node][place] for node in holders], spec, launch, options)
            for place in range(len(by_node[holders[0]]))
        ]
        ours = {"metadata": marks, "spec": _pod_spec(containers, options)}
        affinity = _affinity(holders if spec.gpus else (), options, labels if len(nodes) > 1 else {})
        if affinity:
            ours["spec"]["affinity"] = affinity
        merged: Object = merged_objects(options.pod_template, ours)
        return merged

    if len(nodes) == 1:
        return {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": metadata,
            "spec": {
                "replicas": 1,
                "strategy": {"type": "Recreate"},
                "revisionHistoryLimit": 0,
                "selector": {"matchLabels": labels},
                "template": template(nodes),
            },
        }
    group = {"leaderTemplate": template(nodes[:1]), "workerTemplate": template(nodes[1:])}
    return {
        "apiVersion": LWS,
        "kind": "LeaderWorkerSet",
        "metadata": metadata,
        "spec": {
            "replicas": 1,
            "startupPolicy": "LeaderCreated",
            "leaderWorkerTemplate": {"size": len(nodes), "restartPolicy": "None", **group},
        },
    }


def size_of(made: Mapping[str, Any]) -> int:
    """Return the number of pods of a workload."""
    return int(made["spec"].get("leaderWorkerTemplate", {}).get("size", 1))


def instance_of(made: Mapping[str, Any]) -> DeployedInstance:
    """Return the engine that the annotations of a workload or pod describe. Its `spec` is None if the annotations
    contain no valid spec, which is always the case for pods."""
    try:
        spec = _SPEC.validate_json(annotation(made, SPEC))
    except ValidationError:  # it was lost, or written by another version
        spec = None
    return DeployedInstance(
        EngineId(annotation(made, ENGINE_ID) or made["metadata"]["name"]),
        ConfigurationId(annotation(made, CONFIGURATION)),
        tuple(GpuId(int(gpu)) for gpu in annotation(made, GPUS).split(",") if gpu.isdecimal()),
        spec=spec,
    )


def annotation(made: Mapping[str, Any], key: str) -> str:
    return str((made["metadata"].get("annotations") or {}).get(key) or "")


def merged_objects(under: Any, over: Any) -> Any:
    """Return `under` and `over` merged. Where they conflict, `over` takes precedence. Lists of named objects are merged
    by name. Other lists are concatenated."""
    if isinstance(under, dict) and isinstance(over, dict):
        return {**under, **{key: merged_objects(under[key], over[key]) if key in under else over[key] for key in over}}
    if isinstance(under, list) and isinstance(over, list):
        named = {_name_in(each): each for each in under if _name_in(each)}
        taken = set(map(_name_in, over)) - {None}
        first = [merged_objects(named.get(_name_in(each)), each) for each in over]
        return first + [each for each in under if _name_in(each) not in taken]
    return over


def _name_in(each: Any) -> Any:
    return each.get("name") if isinstance(each, dict) else None


def literal(word: str) -> str:
    """Escape a word so that Kubernetes does not expand `$(NAME)` or replace `$$` by `$` in it. Only the variable that
    contains the leader's address is still expanded."""
    return word.replace("$", "$$").replace("$" + LEADER, LEADER)


def _annotations(spec: EngineSpec, launch: EngineLaunch, fleet: str) -> dict[str, str]:
    return {
        FLEET_NAME: fleet,
        ENGINE_ID: spec.engine,
        CONFIGURATION: spec.configuration,
        GPUS: ",".join(map(str, spec.gpus)),
        PORT: str(urlsplit(url_of(spec, replace(launch, host="localhost"))).port),
        SPEC: _SPEC.dump_json(spec).decode(),
    }


def _faults(
    engine: EngineId, lines: Sequence[CommandLine], nodes: Sequence[int], options: KubernetesOptions
) -> list[str]:
    faults = []
    unnamed = [node for node in nodes if node >= len(options.nodes)] if options.nodes else []
    if unnamed:
        missing = ", ".join(map(str, unnamed))
        faults.append(f"options.nodes: must include nodes {missing}, got {list(options.nodes)}")
    if len(nodes) > 1 and any(line.role in (ProcessRole.FFN, ProcessRole.FFN_NODE) for line in lines):
        lies = ", ".join(map(str, nodes))
        faults.append(f"{engine}.gpus: must be on one node for an AFD layout under Kubernetes, got nodes {lies}")
    return faults


def _container(
    place: int, lines: Sequence[CommandLine], spec: EngineSpec, launch: EngineLaunch, options: KubernetesOptions
) -> Object:
    """Return the container that runs the engine process with index `place` of each pod. `lines` contains the process's
    command line for each pod. If there are several command lines, each pod selects its own by the pod's index."""
    first, name = lines[0], "engine" if place == 0 else f"process-{place}"
    if len(lines) == 1:
        script, words = f'{_ONCE}exec "$@"', list(first.argv)
    else:
        cases = "\n".join(f"{index}) exec {shlex.join(line.argv)} ;;" for index, line in enumerate(lines, 1))
        script, words = f'{_ONCE}case "$ORCHESTRRL_NODE" in\n{cases}\nesac', []
    # Leave out bindings to GPUs or cores of the machine: a container only sees its own, renumbered.
    variables = {key: value for key, value in first.environment.items() if key not in _PINNED}
    if launch.device is EngineDevice.CPU:
        variables["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    environment: list[Object] = [{"name": key, "value": literal(value)} for key, value in variables.items()]
    environment.append({"name": "ORCHESTRRL_RUN", "value": f"{RUNS_FOLDER}/{name}"})
    if len(lines) > 1:
        index: Object = {"fieldRef": {"fieldPath": f"metadata.labels['{WORKER_INDEX}']"}}
        environment.append({"name": "ORCHESTRRL_NODE", "valueFrom": index})
    mounts: list[Object] = [{"name": "orchestrrl-run", "mountPath": RUNS_FOLDER}]
    if options.shm_size is not None:
        mounts.append({"name": "orchestrrl-shm", "mountPath": "/dev/shm"})
    made: Object = {
        "name": name,
        "image": options.image,
        "command": ["/bin/sh", "-c", literal(script), "orchestrrl"],
        "args": [literal(word) for word in words],
        "env": environment,
        "volumeMounts": [*mounts, *options.volume_mounts],
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    needs = _resources(first, spec, launch, options)
    optional = {
        "envFrom": list(options.environment_from),
        "resources": {"limits": needs, "requests": needs} if needs else {},
    }
    return made | {key: value for key, value in optional.items() if value}


def _resources(line: CommandLine, spec: EngineSpec, launch: EngineLaunch, options: KubernetesOptions) -> dict[str, str]:
    held = len(line.gpus) or spec.parallelism.gpus
    if launch.engine is EngineProduct.SIMULATED:
        return {}
    if launch.device is EngineDevice.CUDA:
        return {options.gpu_resource: str(held)}
    return {"cpu": str(held * launch.cores_per_gpu)} if launch.cores_per_gpu else {}


def _pod_spec(containers: list[Object], options: KubernetesOptions) -> Object:
    volumes: list[Object] = [{"name": "orchestrrl-run", "emptyDir": {}}]
    if options.shm_size is not None:
        volumes.append({"name": "orchestrrl-shm", "emptyDir": {"medium": "Memory", "sizeLimit": options.shm_size}})
    made: Object = {
        "restartPolicy": "Always",
        "schedulingGates": [{"name": GATE}],
        "terminationGracePeriodSeconds": options.grace_s,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "containers": containers,
        "volumes": [*volumes, *options.volumes],
    }
    optional = {
        "serviceAccountName": options.service_account,
        "imagePullSecrets": [{"name": name} for name in options.image_pull_secrets],
        "nodeSelector": dict(options.node_selector),
        "tolerations": list(options.tolerations),
    }
    return made | {key: value for key, value in optional.items() if value}


def _affinity(holders: Sequence[int], options: KubernetesOptions, apart: Mapping[str, str]) -> Object:
    """Return the affinity to the nodes that hold the GPUs, if nodes are configured, and anti-affinity between pods with
    the labels `apart`."""
    made: Object = {}
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    if options.nodes and holders:
        named = [options.nodes[node] for node in holders]
        term = {"matchExpressions": [{"key": HOSTNAME, "operator": "In", "values": named}]}
        made["nodeAffinity"] = {required: {"nodeSelectorTerms": [term]}}
    if apart:
        made["podAntiAffinity"] = {required: [{"labelSelector": {"matchLabels": apart}, "topologyKey": HOSTNAME}]}
    return made
