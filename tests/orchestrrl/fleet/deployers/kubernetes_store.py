"""The storage of an API server: objects with uid and resourceVersion, and the rules for accepting, changing and
deleting them. Written from the API's documentation; it contains no code of Kubernetes.

https://kubernetes.io/docs/reference/using-api/api-concepts/ (resourceVersion, field validation, patches)
https://kubernetes.io/docs/concepts/architecture/garbage-collection/ (owners, foreground deletion)
https://kubernetes.io/docs/concepts/overview/working-with-objects/names/ and .../labels/ (valid values)

Shapes are checked against the official client's models, which are generated from Kubernetes' OpenAPI description.
"""

import copy
import json
import re
import uuid
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from kubernetes.aio.client import models
from pydantic import ValidationError

Object = dict[str, Any]

FOREGROUND = "foregroundDeletion"
_LABEL = re.compile(r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?")
_KEY = re.compile(r"([a-z0-9]([a-z0-9.-]*[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
# LeaderWorkerSet's own fields (sigs.k8s.io/lws, api/leaderworkerset/v1); its templates are pods'.
_LWS_SPEC = {"replicas", "leaderWorkerTemplate", "rolloutStrategy", "startupPolicy", "networkConfig"}
_LWS_TEMPLATE = {"leaderTemplate", "workerTemplate", "size", "restartPolicy", "subGroupPolicy"}


class Refused(Exception):
    """A response other than 2xx."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason


class Store:
    """The objects of one namespace, and the nodes. Kinds are named as in paths, e.g. `pods`."""

    def __init__(self) -> None:
        self._objects: dict[tuple[str, str], Object] = {}
        self._version = 0

    def get(self, kind: str, name: str) -> Object:
        try:
            return self._objects[kind, name]
        except KeyError:
            raise Refused(404, "NotFound", f'{kind} "{name}" not found') from None

    def all(self, kind: str) -> list[Object]:
        return [made for (of, _), made in sorted(self._objects.items()) if of == kind]

    def list(self, kind: str, selector: str) -> list[Object]:
        wanted = dict(term.split("=") for term in selector.split(",")) if selector else {}
        return [made for made in self.all(kind) if wanted.items() <= (made["metadata"].get("labels") or {}).items()]

    @property
    def version(self) -> str:
        return str(self._version)

    def create(self, kind: str, given: Mapping[str, Any], strict: bool = False) -> Object:
        made: Object = copy.deepcopy(dict(given))
        check(kind, made, strict)
        name = made["metadata"]["name"]
        if (kind, name) in self._objects:
            raise Refused(409, "AlreadyExists", f'{kind} "{name}" already exists')
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        made["metadata"] |= {"uid": str(uuid.uuid4()), "creationTimestamp": now, "generation": 1}
        made.setdefault("status", {})
        self._objects[kind, name] = made
        self.touch(made)
        return made

    def touch(self, made: Object) -> None:
        """Record that a controller changed the object in place."""
        self._version += 1
        made["metadata"]["resourceVersion"] = str(self._version)

    def patch(self, kind: str, name: str, patch: Mapping[str, Any]) -> Object:
        """Apply a merge patch (RFC 7386). A resourceVersion in it must match the object's."""
        before = self.get(kind, name)
        version = patch.get("metadata", {}).get("resourceVersion")
        if version is not None and version != before["metadata"]["resourceVersion"]:
            words = "the object has been modified; please apply your changes to the latest version and try again"
            raise Refused(409, "Conflict", f'Operation cannot be fulfilled on {kind} "{name}": {words}')
        after = _merged(copy.deepcopy(before), patch)
        check(kind, after, strict=False)
        if kind == "pods":
            _only_gates_went(before, after)
        self._objects[kind, name] = after
        self.touch(after)
        return after

    def delete(self, kind: str, name: str, order: Mapping[str, Any]) -> Object:
        made = self.get(kind, name)
        uid = order.get("preconditions", {}).get("uid")
        if uid is not None and uid != made["metadata"]["uid"]:
            raise Refused(409, "Conflict", f'Precondition failed: UID in precondition: {uid} of {kind} "{name}"')
        if "deletionTimestamp" in made["metadata"]:
            return made
        foreground = order.get("propagationPolicy") == "Foreground"
        # A scheduled pod is removed by its node once its containers have ended.
        waits = "nodeName" in made["spec"] if kind == "pods" else foreground
        if not waits:
            return self._objects.pop((kind, name))
        made["metadata"]["deletionTimestamp"] = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        if kind != "pods":
            made["metadata"]["finalizers"] = [*made["metadata"].get("finalizers", []), FOREGROUND]
        self.touch(made)
        return made

    def remove(self, kind: str, name: str) -> None:
        self._objects.pop((kind, name), None)

    def there(self, kind: str, made: Object) -> bool:
        return self._objects.get((kind, made["metadata"]["name"])) is made

    def collect_garbage(self) -> None:
        """Run one round of garbage collection: a foreground deletion removes dependents first; objects without their
        owner are removed."""
        living = {made["metadata"]["uid"] for made in self._objects.values()}
        for (kind, name), made in list(self._objects.items()):
            owners = made["metadata"].get("ownerReferences", [])
            if owners and not any(owner["uid"] in living for owner in owners):
                self.delete(kind, name, {})
            if FOREGROUND not in made["metadata"].get("finalizers", []):
                continue
            dependents = list(self._dependents(made))
            for of, each in dependents:
                self.delete(of, each["metadata"]["name"], {"propagationPolicy": "Foreground"})
            if not dependents:
                self.remove(kind, name)

    def _dependents(self, owner: Object) -> Iterator[tuple[str, Object]]:
        for (kind, _), made in list(self._objects.items()):
            uids = [each["uid"] for each in made["metadata"].get("ownerReferences", [])]
            if owner["metadata"]["uid"] in uids:
                yield kind, made


def check(kind: str, made: Object, strict: bool) -> None:
    """Raise Refused for an object that the API server does not accept."""
    if kind == "leaderworkersets":
        _check_group(made, strict)
    else:
        model = {"deployments": models.V1Deployment, "pods": models.V1Pod, "nodes": models.V1Node}.get(kind)
        if model is not None:
            check_shape(model, made, strict, "")
    metadata = made["metadata"]
    if not _NAME.fullmatch(metadata.get("name", "")) or metadata.get("namespace", "") == "":
        _invalid(f"metadata.name or metadata.namespace: {metadata.get('name')!r}")
    for key, value in (metadata.get("labels") or {}).items():
        if not _KEY.fullmatch(key) or not _LABEL.fullmatch(value):
            _invalid(f"metadata.labels: Invalid value: {key}={value}")
    annotations = metadata.get("annotations") or {}
    if any(not _KEY.fullmatch(key) for key in annotations) or sum(map(len, annotations.values())) > 256 * 1024:
        _invalid("metadata.annotations")
    if kind == "deployments":
        template = made["spec"]["template"]
        wanted = made["spec"]["selector"]["matchLabels"]
        if not wanted.items() <= (template["metadata"].get("labels") or {}).items():
            _invalid("spec.template.metadata.labels: `selector` does not match template `labels`")
    for template in _templates(kind, made):
        if template["spec"].get("restartPolicy", "Always") != "Always":
            _invalid('spec.template.spec.restartPolicy: Unsupported value: supported values: "Always"')
        _check_pod_spec(template["spec"])


def _templates(kind: str, made: Object) -> list[Object]:
    if kind == "deployments":
        return [made["spec"]["template"]]
    if kind == "leaderworkersets":
        group = made["spec"]["leaderWorkerTemplate"]
        return [group[name] for name in ("leaderTemplate", "workerTemplate") if name in group]
    return []


def _check_pod_spec(spec: Object) -> None:
    names = [each["name"] for each in spec["containers"]]
    volumes = [each["name"] for each in spec.get("volumes", [])]
    if len(set(names)) != len(names) or not all(map(_NAME.fullmatch, names)):
        _invalid(f"spec.template.spec.containers: {names}")
    if len(set(volumes)) != len(volumes):
        _invalid(f"spec.template.spec.volumes: Duplicate value: {volumes}")
    for container in spec["containers"]:
        unknown = [each["name"] for each in container.get("volumeMounts", []) if each["name"] not in volumes]
        if unknown:
            _invalid(f"spec.template.spec.containers.volumeMounts: Not found: {unknown}")
        paths = [each["mountPath"] for each in container.get("volumeMounts", [])]
        if len(set(paths)) != len(paths):
            _invalid(f"spec.template.spec.containers.volumeMounts: must be unique: {paths}")


def check_shape(model: Any, given: Any, strict: bool, path: str) -> None:
    """Check that the client's model accepts the object and defines all of its fields."""
    try:
        known = json.loads(model.from_dict(copy.deepcopy(given)).to_json())
    except ValidationError as error:
        raise Refused(400, "BadRequest", f"cannot be decoded: {path} {error}") from None
    lost = sorted(_lost(given, known, path))
    if lost and strict:
        raise Refused(400, "BadRequest", f'strict decoding error: unknown field "{lost[0]}"')


def _lost(given: Any, known: Any, path: str) -> Iterator[str]:
    if isinstance(given, dict) and isinstance(known, dict):
        for key, value in given.items():
            if key not in known and value not in (None, [], {}):
                yield f"{path}.{key}".lstrip(".")
            elif key in known:
                yield from _lost(value, known[key], f"{path}.{key}")
    elif isinstance(given, list) and isinstance(known, list):
        for place, (one, other) in enumerate(zip(given, known, strict=True)):
            yield from _lost(one, other, f"{path}[{place}]")


def _check_group(made: Object, strict: bool) -> None:
    check_shape(models.V1ObjectMeta, made["metadata"], strict, "metadata")
    group = made["spec"].get("leaderWorkerTemplate", {})
    unknown = sorted({*made["spec"]} - _LWS_SPEC) + sorted({*group} - _LWS_TEMPLATE)
    if unknown and strict:
        raise Refused(400, "BadRequest", f'strict decoding error: unknown field "{unknown[0]}"')
    if "workerTemplate" not in group:
        _invalid("spec.leaderWorkerTemplate.workerTemplate: Required value")
    if group.get("restartPolicy", "None") not in ("None", "RecreateGroupOnPodRestart", "RecreateGroupAfterStart"):
        _invalid(f"spec.leaderWorkerTemplate.restartPolicy: Unsupported value: {group['restartPolicy']}")
    for name in ("leaderTemplate", "workerTemplate"):
        if name in group:
            check_shape(models.V1PodTemplateSpec, group[name], strict, name)


def _only_gates_went(before: Object, after: Object) -> None:
    """Return whether only scheduling gates were removed:
    https://kubernetes.io/docs/concepts/scheduling-eviction/pod-scheduling-readiness/"""
    had, has = (made["spec"].get("schedulingGates") or [] for made in (before, after))
    if any(gate not in had for gate in has):
        _invalid("spec.schedulingGates: only deletion is allowed, but found new scheduling gate")
    rest = [{key: value for key, value in made["spec"].items() if key != "schedulingGates"} for made in (before, after)]
    if rest[0] != rest[1]:
        _invalid("spec: Forbidden: pod updates may not change fields other than the image and a few more")


def _invalid(what: str) -> None:
    raise Refused(422, "Invalid", f"is invalid: {what}")


def _merged(under: Any, patch: Any) -> Any:
    if not isinstance(patch, Mapping) or not isinstance(under, dict):
        return copy.deepcopy(patch)
    for key, value in patch.items():
        if value is None:
            under.pop(key, None)
        else:
            under[key] = _merged(under.get(key, {}), value)
    return under
