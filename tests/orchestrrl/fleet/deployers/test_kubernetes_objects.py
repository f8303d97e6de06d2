"""Tests of engines' objects: their names, their shapes by the official client's models, and Kubernetes' expansion of
words."""

import shlex
from dataclasses import replace
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from kubernetes.aio.client import models
from kubernetes_cluster import NAMESPACE, expanded
from kubernetes_server import MANIFEST
from kubernetes_store import check, check_shape

from orchestrrl.core.config.launch import EngineDevice
from orchestrrl.core.errors import ProblemFaults
from orchestrrl.fleet.deployers.base import DeployedInstance, read_options
from orchestrrl.fleet.deployers.command_line import EngineLaunch, EngineSpec, render
from orchestrrl.fleet.deployers.kubernetes_objects import (
    LEADER,
    KubernetesOptions,
    instance_of,
    literal,
    merged_objects,
    name_of,
    size_of,
    workload,
)
from planner.model import ConfigurationId, EngineId, GpuId, Parallelism

LAUNCH = EngineLaunch(python="python3", model="some/model", per_node=4, nodes=("a", "b", "c", "d"), first_port=8000)
ids = st.text(min_size=1, max_size=80)


def spec(parallelism: Parallelism, first: int = 0, **more: Any) -> EngineSpec:
    gpus = tuple(GpuId(first + n) for n in range(parallelism.gpus))
    return EngineSpec(EngineId("e0"), ConfigurationId("some"), parallelism, gpus, **more)


def options(**given: Any) -> KubernetesOptions:
    return read_options(KubernetesOptions, {"image": "vllm:1", "namespace": NAMESPACE, **given})


def containers(made: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = made["spec"]["template"]["spec"]["containers"]
    return found


@given(fleet=ids, engine=ids, other=ids)
def test_names_are_dns_labels_and_unique_per_id(fleet: str, engine: str, other: str) -> None:
    name = name_of(fleet, engine)
    assert len(name) <= 45
    assert name[0].isalpha()
    assert name[-1] != "-"
    assert all(letter in "abcdefghijklmnopqrstuvwxyz0123456789-" for letter in name)
    assert name == name_of(fleet, engine)
    assert (name == name_of(fleet, other)) == (engine == other)
    assert (name == name_of(other, engine)) == (fleet == other)


@given(word=st.text(alphabet="$()ABC_ x", max_size=30))
def test_words_survive_kubernetes_expansion(word: str) -> None:
    assert expanded(literal(word), {"A": "expanded", "ABC": "too", "LWS_LEADER_ADDRESS": "10.0.0.1"}) == word


def test_only_the_leaders_address_is_expanded() -> None:
    environment = {"LWS_LEADER_ADDRESS": "10.0.0.1", "HOME": "/root"}
    assert expanded(literal(f"--at {LEADER} $(HOME) $$"), environment) == "--at 10.0.0.1 $(HOME) $$"


ON_CPUS = [(Parallelism(), 0), (Parallelism(tp=4), 4), (Parallelism(tp=2, pp=2), 0), (Parallelism(dp=4, ep=4), 0)]
ON_GPUS = [
    *ON_CPUS,
    (Parallelism(tp=2, dp=2), 0),
    (Parallelism(attention_gpus=2, ffn_gpus=2), 0),
    (Parallelism(tp=8), 0),
    (Parallelism(tp=4, pp=3), 4),
    (Parallelism(dp=16, ep=16), 0),
]


@pytest.mark.parametrize(
    ("device", "parallelism", "first"),
    [(EngineDevice.CPU, *each) for each in ON_CPUS] + [(EngineDevice.CUDA, *each) for each in ON_GPUS],
)
def test_every_layout_renders_an_object_that_the_api_accepts(
    device: EngineDevice, parallelism: Parallelism, first: int
) -> None:
    over_nodes = parallelism.gpus > LAUNCH.per_node
    wanted = spec(parallelism, first, arguments=("--max-model-len", "4096"), environment={"HOME": "$(HOME)"})
    full = options(
        nodes=["n0", "n1", "n2", "n3"],
        service_account="engines",
        image_pull_secrets=["registry"],
        node_selector={"gpu": "h100"},
        tolerations=[{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        volumes=[{"name": "models", "persistentVolumeClaim": {"claimName": "models"}}],
        volume_mounts=[{"name": "models", "mountPath": "/models", "readOnly": True}],
        environment_from=[{"secretRef": {"name": "hugging-face"}}],
        pod_template={
            "metadata": {"labels": {"team": "rl"}},
            "spec": {"hostNetwork": True, "priorityClassName": "high"},
        },
    )
    made = workload(wanted, replace(LAUNCH, device=device, cores_per_gpu=2), full, "fleet")
    made["metadata"]["namespace"] = NAMESPACE
    check("leaderworkersets" if over_nodes else "deployments", made, strict=True)
    assert (made["kind"] == "LeaderWorkerSet") == over_nodes
    assert size_of(made) == max(1, parallelism.gpus // 4)
    assert instance_of(made) == DeployedInstance(wanted.engine, wanted.configuration, wanted.gpus, spec=wanted)


def test_container_runs_the_rendered_command_at_the_pod_address() -> None:
    wanted = spec(Parallelism(tp=2), 2)
    made = workload(wanted, LAUNCH, options(), "fleet")
    (container,) = containers(made)
    (line,) = render(wanted, replace(LAUNCH, host="0.0.0.0"))
    assert container["args"] == list(line.argv)
    assert "0.0.0.0" in container["args"]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": "2"}, "requests": {"nvidia.com/gpu": "2"}}
    variables = {each["name"]: each.get("value") for each in container["env"]}
    assert variables["VLLM_SERVER_DEV_MODE"] == "1"
    assert "CUDA_VISIBLE_DEVICES" not in variables


def test_cores_are_requested_and_not_bound() -> None:
    launch = replace(LAUNCH, device=EngineDevice.CPU, cores_per_gpu=3)
    (container,) = containers(workload(spec(Parallelism(tp=2)), launch, options(), "fleet"))
    assert container["resources"]["limits"] == {"cpu": "6"}
    assert {"name": "VLLM_CPU_OMP_THREADS_BIND", "value": "nobind"} in container["env"]


def test_each_node_of_an_engine_gets_its_own_command() -> None:
    wanted = spec(Parallelism(tp=4, pp=3))
    group = workload(wanted, LAUNCH, options(nodes=["n0", "n1", "n2"]), "fleet")["spec"]["leaderWorkerTemplate"]
    (leader,) = group["leaderTemplate"]["spec"]["containers"]
    (worker,) = group["workerTemplate"]["spec"]["containers"]
    lines = render(wanted, replace(LAUNCH, host="0.0.0.0", nodes=(LEADER,) * 3))
    assert leader["args"] == [literal(word) for word in lines[0].argv]
    script = expanded(worker["command"][2], {"LWS_LEADER_ADDRESS": LEADER})
    for index, line in enumerate(lines[1:], 1):
        (case,) = [row for row in script.splitlines() if row.startswith(f"{index}) ")]
        assert shlex.split(case)[2:-1] == list(line.argv)
    affinity = group["workerTemplate"]["spec"]["affinity"]
    rule = affinity["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert rule["nodeSelectorTerms"][0]["matchExpressions"][0]["values"] == ["n1", "n2"]


def test_template_fields_are_kept_unless_overridden() -> None:
    template = {
        "metadata": {"annotations": {"k8s.v1.cni.cncf.io/networks": "rdma"}},
        "spec": {
            "hostIPC": True,
            "initContainers": [{"name": "fetch", "image": "models:1"}],
            "containers": [
                {"name": "engine", "image": "other:1", "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}}},
                {"name": "sidecar", "image": "metrics:1"},
            ],
        },
    }
    made = workload(spec(Parallelism()), LAUNCH, options(pod_template=template), "fleet")
    pod = made["spec"]["template"]
    engine, sidecar = pod["spec"]["containers"]
    assert (engine["image"], sidecar["image"]) == ("vllm:1", "metrics:1")
    assert engine["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}}
    assert pod["spec"]["hostIPC"]
    assert pod["metadata"]["annotations"]["k8s.v1.cni.cncf.io/networks"] == "rdma"
    assert pod["spec"]["initContainers"] == template["spec"]["initContainers"]
    made["metadata"]["namespace"] = NAMESPACE
    check("deployments", made, strict=True)


names = st.sampled_from("abc")
things = st.lists(st.fixed_dictionaries({"name": names, "value": st.integers()}), unique_by=lambda each: each["name"])


@given(under=things, over=things)
def test_named_objects_are_merged_by_name(under: list[dict[str, Any]], over: list[dict[str, Any]]) -> None:
    merged = merged_objects(under, over)
    by_name = {each["name"]: each for each in (*under, *over)}
    assert {each["name"]: each for each in merged} == by_name
    assert len(merged) == len(by_name)


def test_all_option_faults_are_reported_at_once() -> None:
    given = {
        "nodes": ["a", "a"],
        "context": "c",
        "grace_s": 0,
        "colour": "red",
        "pod_template": {"spec": {"restartPolicy": "Never"}},
    }
    with pytest.raises(ProblemFaults) as caught:
        read_options(KubernetesOptions, given)
    faults = "\n".join(sorted(caught.value.faults))
    for path in ("options.image: is missing", "options.grace_s: must be > 0", "options.colour: is not a known field"):
        assert path in faults
    assert "options.pod_template: must not set restartPolicy" in faults
    with pytest.raises(ProblemFaults) as caught:
        read_options(KubernetesOptions, {"image": "i", "nodes": ["a", "a"], "context": "c"})
    assert [fault.partition(":")[0] for fault in caught.value.faults] == ["options.nodes", "options.context"]


def test_faults_name_the_engine() -> None:
    with pytest.raises(ProblemFaults, match=r"options\.nodes: must include nodes 1, got \['n0'\]"):
        workload(spec(Parallelism(tp=4), 4), LAUNCH, options(nodes=["n0"]), "fleet")
    with pytest.raises(ProblemFaults, match=r"e0\.gpus: must be on one node for an AFD layout under Kubernetes"):
        workload(spec(Parallelism(attention_gpus=4, ffn_gpus=4)), LAUNCH, options(), "fleet")
    with pytest.raises(ProblemFaults, match="contradicts"):
        workload(spec(Parallelism(), arguments=("-tp", "4")), LAUNCH, options(), "fleet")


def test_rbac_manifest_matches_the_api() -> None:
    kinds = {
        "ServiceAccount": models.V1ServiceAccount,
        "Role": models.V1Role,
        "RoleBinding": models.V1RoleBinding,
        "ClusterRole": models.V1ClusterRole,
        "ClusterRoleBinding": models.V1ClusterRoleBinding,
    }
    found = list(yaml.safe_load_all(MANIFEST.read_text()))
    assert [made["kind"] for made in found] == list(kinds)
    for made in found:
        check_shape(kinds[made["kind"]], made, True, made["kind"])
