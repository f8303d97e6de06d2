"""A small Kubernetes cluster behind the API server of these tests: controllers, a scheduler and kubelets. A container's
command is run as a process of this machine, at its pod's own address (127.x.y.z).

Written from the documentation, with no code of Kubernetes:

https://kubernetes.io/docs/concepts/workloads/controllers/deployment/ and .../replicaset/
https://kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle/ (states, restarts with a growing pause, termination)
https://kubernetes.io/docs/concepts/scheduling-eviction/pod-scheduling-readiness/ (gates)
https://kubernetes.io/docs/tasks/inject-data-application/define-interdependent-environment-variables/ (`$(NAME)`)
https://lws.sigs.k8s.io/docs/reference/ (names, labels and LWS_LEADER_ADDRESS of a group's pods)

Differences from a real cluster: a LeaderWorkerSet owns its pods without StatefulSets in between, names are not resolved
(a leader's address is its IP), everything is a hundred times faster, and `emptyDir` is the only kind of volume.
"""

import asyncio
import contextlib
import os
import random
import re
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kubernetes_store import Object, Refused, Store

NAMESPACE = "engines"
TICK_S = 0.01
BACK_OFF_S = (0.02, 0.1, 0.2, 0.4, 0.8)  # between runs of a container
_LWS = "leaderworkerset.sigs.k8s.io"
_REFERENCE = re.compile(r"\$(\$|\(([A-Za-z_][A-Za-z0-9_.-]*)\))")


class Cluster:
    """A cluster. `nodes` maps names to GPU counts; `images` can be pulled."""

    def __init__(self, folder: Path, nodes: Mapping[str, int], images: tuple[str, ...] = ("engine:1",)) -> None:
        self.store = Store()
        self.groups_installed = True
        self.pod_quota: int | None = None
        self.images = images
        self._folder = folder
        self._kubelets: dict[str, asyncio.Task[None]] = {}  # by pod uid
        self._frozen: set[str] = set()
        self._loopback = random.randrange(1, 255), random.randrange(200)  # not that of a concurrent test process
        self._addresses: dict[str, str] = {}
        self._loop: asyncio.Task[None] | None = None
        for name, gpus in nodes.items():
            self.store.create(
                "nodes",
                {
                    "metadata": {"name": name, "namespace": "-", "labels": {"kubernetes.io/hostname": name}},
                    "status": {
                        "allocatable": {"nvidia.com/gpu": str(gpus)},
                        "conditions": [{"type": "Ready", "status": "True"}],
                    },
                },
            )

    async def begin(self) -> None:
        self._loop = asyncio.create_task(self._control())

    async def end(self) -> None:
        tasks = [task for task in (self._loop, *self._kubelets.values()) if task is not None]
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for error in results:
            if isinstance(error, Exception):
                raise error

    # Failures.

    def lose_node(self, name: str) -> None:
        """Make a node unreachable: its kubelet stops reporting, and its processes continue unseen."""
        self._frozen.add(name)
        self._tell_ready(name, "Unknown")

    def find_node(self, name: str) -> None:
        self._frozen.discard(name)
        self._tell_ready(name, "True")

    def _tell_ready(self, name: str, status: str) -> None:
        node = self.store.get("nodes", name)
        node["status"]["conditions"] = [{"type": "Ready", "status": status}]
        self.store.touch(node)

    def evict(self, pod: str) -> None:
        self.store.delete("pods", pod, {})

    # Controllers.

    async def _control(self) -> None:
        while True:
            for deployment in self.store.all("deployments"):
                self._keep_replica_set(deployment)
            for owner in self.store.all("replicasets"):
                self._keep_replica(owner)
            for group in self.store.all("leaderworkersets"):
                self._keep_group(group)
            self.store.collect_garbage()
            for pod in self.store.all("pods"):
                self._place(pod)
                self._run(pod)
            await asyncio.sleep(TICK_S)

    def _keep_replica_set(self, deployment: Object) -> None:
        if "deletionTimestamp" in deployment["metadata"]:
            return
        name = f"{deployment['metadata']['name']}-5d9c7b"
        with contextlib.suppress(Refused):
            spec = {"template": deployment["spec"]["template"], "replicas": deployment["spec"].get("replicas", 1)}
            self.store.create("replicasets", {"metadata": _owned(name, deployment), "spec": spec})

    def _keep_replica(self, owner: Object) -> None:
        if "deletionTimestamp" in owner["metadata"] or self._active(owner):
            return
        deployment = self.store.get("deployments", owner["metadata"]["ownerReferences"][0]["name"])
        if self.pod_quota is not None and len(self.store.all("pods")) >= self.pod_quota:
            message = f'pods "x" is forbidden: exceeded quota: pods, limited: pods={self.pod_quota}'
            failure = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": message}
            if deployment["status"].get("conditions") != [failure]:
                deployment["status"]["conditions"] = [failure]
                self.store.touch(deployment)
            return
        if deployment["status"].pop("conditions", None):
            self.store.touch(deployment)
        name = f"{owner['metadata']['name']}-{os.urandom(3).hex()}"
        self._make_pod(name, owner, owner["spec"]["template"], {})

    def _active(self, owner: Object) -> list[Object]:
        uid = owner["metadata"]["uid"]
        return [
            pod
            for pod in self.store.all("pods")
            if pod["metadata"]["ownerReferences"][0]["uid"] == uid
            and "deletionTimestamp" not in pod["metadata"]
            and pod["status"].get("phase") not in ("Failed", "Succeeded")
        ]

    def _keep_group(self, group: Object) -> None:
        if "deletionTimestamp" in group["metadata"]:
            return
        name, wanted = group["metadata"]["name"], group["spec"]["leaderWorkerTemplate"]
        for index in range(wanted.get("size", 1)):
            pod = f"{name}-0-{index}" if index else f"{name}-0"
            worker = wanted["workerTemplate"]
            template = worker if index else wanted.get("leaderTemplate", worker)
            labels = {f"{_LWS}/name": name, f"{_LWS}/group-index": "0", f"{_LWS}/worker-index": str(index)}
            with contextlib.suppress(Refused):
                self._make_pod(pod, group, template, labels, {"LWS_LEADER_ADDRESS": self.address_of(f"{name}-0")})

    def _make_pod(
        self,
        name: str,
        owner: Object,
        template: Object,
        labels: Mapping[str, str],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        marks = template.get("metadata", {})
        metadata = _owned(name, owner) | {
            "labels": {**marks.get("labels", {}), **labels},
            "annotations": dict(marks.get("annotations", {})),
        }
        made = self.store.create("pods", {"metadata": metadata, "spec": template["spec"]})
        for container in made["spec"]["containers"]:
            injected = [{"name": key, "value": value} for key, value in (environment or {}).items()]
            container["env"] = injected + container.get("env", [])
        made["status"] = {"phase": "Pending"}

    def address_of(self, pod: str) -> str:
        n, (net, first) = len(self._addresses), self._loopback
        return self._addresses.setdefault(pod, f"127.{net}.{first + n // 250}.{n % 250 + 1}")

    # The scheduler.

    def _place(self, pod: Object) -> None:
        if "nodeName" in pod["spec"] or "deletionTimestamp" in pod["metadata"]:
            return
        if pod["spec"].get("schedulingGates"):
            self._tell_placed(pod, "SchedulingGated", "Scheduling is blocked due to non-empty scheduling gates")
            return
        for node in self.store.all("nodes"):
            if self._fits(pod, node):
                pod["spec"]["nodeName"] = node["metadata"]["name"]
                self._tell_placed(pod, "", "")
                return
        count = len(self.store.all("nodes"))
        self._tell_placed(pod, "Unschedulable", f"0/{count} nodes are available: Insufficient nvidia.com/gpu.")

    def _tell_placed(self, pod: Object, reason: str, message: str) -> None:
        condition = {"type": "PodScheduled", "status": "False" if reason else "True"}
        condition |= {"reason": reason, "message": message} if reason else {}
        if pod["status"].get("conditions") != [condition]:
            pod["status"]["conditions"] = [condition]
            self.store.touch(pod)

    def _fits(self, pod: Object, node: Object) -> bool:
        name = node["metadata"]["name"]
        affinity = pod["spec"].get("affinity", {})
        required = "requiredDuringSchedulingIgnoredDuringExecution"
        for term in affinity.get("nodeAffinity", {}).get(required, {}).get("nodeSelectorTerms", []):
            for each in term["matchExpressions"]:
                if node["metadata"]["labels"].get(each["key"]) not in each["values"]:
                    return False
        there = [other for other in self.store.all("pods") if other["spec"].get("nodeName") == name]
        for term in affinity.get("podAntiAffinity", {}).get(required, []):
            apart = term["labelSelector"]["matchLabels"].items()
            if any(apart <= other["metadata"]["labels"].items() for other in there):
                return False
        free = int(node["status"]["allocatable"]["nvidia.com/gpu"]) - sum(map(_gpus, there))
        return node["status"]["conditions"][0]["status"] == "True" and _gpus(pod) <= free

    # Kubelets.

    def _run(self, pod: Object) -> None:
        uid = pod["metadata"]["uid"]
        if "nodeName" in pod["spec"] and uid not in self._kubelets:
            self._kubelets[uid] = asyncio.create_task(_Kubelet(self, pod, self._folder / uid).run())

    def frozen(self, pod: Object) -> bool:
        return pod["spec"]["nodeName"] in self._frozen

    def log(self, pod: Object, container: str, previous: bool) -> str:
        runs = sorted(
            (self._folder / pod["metadata"]["uid"]).glob(f"{container}.*.log"),
            key=lambda path: int(path.suffixes[-2][1:]),
        )
        if len(runs) < 1 + previous:
            before = "previous terminated " if previous else ""
            name = pod["metadata"]["name"]
            raise Refused(400, "BadRequest", f'{before}container "{container}" in pod "{name}" not found')
        return runs[-1 - previous].read_text(errors="replace")


class _Kubelet:
    """The kubelet's work for one pod, from its start until it is removed."""

    def __init__(self, cluster: Cluster, pod: Object, folder: Path) -> None:
        self._cluster = cluster
        self._name = pod["metadata"]["name"]
        self._uid = pod["metadata"]["uid"]
        self._folder = folder
        self._node = pod["spec"]["nodeName"]
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._ended_s: dict[str, float] = {}

    @property
    def _pod(self) -> Object:
        return self._cluster.store.get("pods", self._name)

    async def run(self) -> None:
        self._folder.mkdir(parents=True)
        try:
            self._pod["status"] |= {"podIP": self._cluster.address_of(self._name), "containerStatuses": []}
            for container in self._pod["spec"]["containers"]:
                status = {"name": container["name"], "image": container["image"], "imageID": "", "ready": False}
                status |= {"restartCount": 0, "state": {"waiting": {"reason": "ContainerCreating"}}, "lastState": {}}
                self._pod["status"]["containerStatuses"].append(status)
            while "deletionTimestamp" not in self._pod["metadata"]:
                if not self._cluster.frozen(self._pod):
                    self._look_after()
                await asyncio.sleep(TICK_S)
            await self._terminate()
        finally:
            for process in self._processes.values():
                _signal(process, signal.SIGKILL)

    def _look_after(self) -> None:
        pod = self._pod
        for container, status in zip(pod["spec"]["containers"], pod["status"]["containerStatuses"], strict=True):
            before = str(status)
            name, state = container["name"], status["state"]
            process = self._processes.get(name)
            if process is None and container["image"] not in self._cluster.images:
                again = state["waiting"]["reason"] != "ContainerCreating"
                reason = "ImagePullBackOff" if again else "ErrImagePull"
                status["state"] = {"waiting": {"reason": reason, "message": f'Back-off pulling "{container["image"]}"'}}
            elif process is None:
                self._begin(container, status)
            elif "running" in state and process.poll() is not None:
                self._ended_s[name] = asyncio.get_running_loop().time()
                status["state"] = {"terminated": self._end_of(container, status, process)}
            elif "running" not in state:
                self._again(container, status)
            if str(status) != before:
                running = all("running" in each["state"] for each in pod["status"]["containerStatuses"])
                pod["status"]["phase"] = "Running" if running else pod["status"]["phase"]
                self._cluster.store.touch(pod)

    def _again(self, container: Object, status: Object) -> None:
        """Restart a container that has ended, after a pause, the first time at once."""
        if "terminated" in status["state"]:
            status["lastState"] = status["state"]
        waited_s = asyncio.get_running_loop().time() - self._ended_s[container["name"]]
        pause_s = BACK_OFF_S[min(status["restartCount"], len(BACK_OFF_S) - 1)]
        if waited_s >= pause_s:
            status["restartCount"] += 1
            self._begin(container, status)
        elif status["restartCount"]:
            status["state"] = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off restarting"}}

    def _begin(self, container: Object, status: Object) -> None:
        pod = self._pod
        environment: dict[str, str] = {}
        for each in container.get("env", []):
            value = each.get("value", "")
            if "valueFrom" in each:
                path = each["valueFrom"]["fieldRef"]["fieldPath"]
                value = pod["metadata"]["labels"][path.removeprefix("metadata.labels['").removesuffix("']")]
            environment[each["name"]] = self._mounted(container, expanded(value, environment))
        words = [
            self._mounted(container, expanded(word, environment))
            for word in (*container["command"], *container.get("args", []))
        ]
        # A pod owns all ports of its address; here the address is a loopback address.
        words = [pod["status"]["podIP"] if word == "0.0.0.0" else word for word in words]
        with (self._folder / f"{container['name']}.{status['restartCount']}.log").open("wb") as log:
            try:
                self._processes[container["name"]] = subprocess.Popen(
                    words,
                    env={"PATH": os.environ["PATH"], **environment},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                status["state"] = {"waiting": {"reason": "RunContainerError", "message": str(error)}}
                return
        status["state"] = {"running": {}}

    def _mounted(self, container: Object, word: str) -> str:
        empty = {each["name"] for each in self._pod["spec"].get("volumes", []) if "emptyDir" in each}
        for mount in container.get("volumeMounts", []):
            if mount["name"] in empty and mount["mountPath"] != "/dev/shm":
                place = self._folder / mount["name"]
                place.mkdir(exist_ok=True)
                word = word.replace(mount["mountPath"], str(place))
        return word

    def _end_of(self, container: Object, status: Object, process: subprocess.Popen[bytes]) -> Object:
        code = process.returncode
        words = self._cluster.log(self._pod, container["name"], previous=False)
        facts: dict[str, Any] = {
            "exitCode": 128 - code if code < 0 else code,
            "reason": "Error" if code else "Completed",
        }
        if code and container.get("terminationMessagePolicy") == "FallbackToLogsOnError":
            facts["message"] = words[-2048:]
        return facts

    async def _terminate(self) -> None:
        grace_s = self._pod["spec"].get("terminationGracePeriodSeconds", 30)
        await self._while_lost()
        for process in self._processes.values():
            _signal(process, signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                while any(process.poll() is None for process in self._processes.values()):
                    await asyncio.sleep(TICK_S)
        for process in self._processes.values():
            _signal(process, signal.SIGKILL)
            process.wait()
        await self._while_lost()
        self._cluster.store.remove("pods", self._name)

    async def _while_lost(self) -> None:
        while self._cluster.frozen(self._pod):
            await asyncio.sleep(TICK_S)


def _owned(name: str, owner: Object) -> Object:
    reference = {
        "apiVersion": "v1",
        "kind": "Owner",
        "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"],
        "blockOwnerDeletion": True,
        "controller": True,
    }
    return {"name": name, "namespace": NAMESPACE, "ownerReferences": [reference]}


def _gpus(pod: Object) -> int:
    return sum(
        int(container.get("resources", {}).get("limits", {}).get("nvidia.com/gpu", "0"))
        for container in pod["spec"]["containers"]
    )


def expanded(word: str, environment: Mapping[str, str]) -> str:
    """Expand `$(NAME)` for variables that are set, and `$$` to `$`; leave other names as written."""

    def of(found: re.Match[str]) -> str:
        return "$" if found[1] == "$" else environment.get(found[2], found[0])

    return _REFERENCE.sub(of, word)


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
