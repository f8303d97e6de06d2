"""The REST API of the test cluster: paths, answers and Status objects as in the API's documentation
(https://kubernetes.io/docs/reference/using-api/api-concepts/), for the official client. The token `deployer` has
exactly the permissions of deploy/kubernetes/rbac.yaml; `admin` has all."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web
from kubernetes_cluster import NAMESPACE, Cluster
from kubernetes_store import Refused

MANIFEST = Path(__file__).parents[4] / "deploy/kubernetes/rbac.yaml"
GROUPS = {"deployments": "apps", "leaderworkersets": "leaderworkerset.x-k8s.io", "pods": "", "nodes": ""}
VERBS = {"POST": "create", "PATCH": "patch", "DELETE": "delete"}


class Trouble(StrEnum):
    """A failure of one request."""

    BUSY = "busy"  # 503, nothing is changed
    LOST = "lost"  # the change is made, and the connection breaks
    STALLED = "stalled"  # the change is made, and no answer is sent
    BROKEN = "broken"  # 500, but the change is made


@dataclass(frozen=True)
class Request:
    method: str
    path: str


class Server:
    """The API server of a cluster. `asked` contains all requests so far."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.asked: list[Request] = []
        self.url = ""
        self.rules = _rules()
        self._troubles: list[tuple[str, str, Trouble]] = []
        self._later: dict[int, Trouble] = {}
        self._runner: web.AppRunner | None = None
        self._stalled = asyncio.Event()

    def trouble(self, method: str, path_part: str, trouble: Trouble) -> None:
        self._troubles.append((method, path_part, trouble))

    def trouble_after(self, requests: int, trouble: Trouble) -> None:
        """Make the request after this many others fail."""
        self._later[len(self.asked) + requests] = trouble

    async def begin(self) -> None:
        app = web.Application()
        for prefix in (
            "/apis/{group}/v1/namespaces/{namespace}/{kind:deployments|leaderworkersets}",
            "/api/v1/namespaces/{namespace}/{kind:pods}",
        ):
            app.router.add_route("*", prefix, self._answer)
            app.router.add_route("*", prefix + "/{name}", self._answer)
        app.router.add_get("/api/v1/namespaces/{namespace}/{kind:pods}/{name}/{part:log}", self._answer)
        app.router.add_get("/api/v1/{kind:nodes}/{name}", self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def end(self) -> None:
        self._stalled.set()
        assert self._runner is not None
        await self._runner.cleanup()

    def kubeconfig(self, folder: Path, token: str = "deployer") -> str:
        path = folder / f"kubeconfig-{token}"
        cluster = {"name": "c", "cluster": {"server": self.url}}
        user = {"name": "u", "user": {"token": token}}
        context = {"name": "x", "context": {"cluster": "c", "user": "u"}}
        document = {"apiVersion": "v1", "kind": "Config", "current-context": "x"}
        document |= {"clusters": [cluster], "users": [user], "contexts": [context]}
        path.write_text(yaml.safe_dump(document))
        return str(path)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        trouble = self._later.pop(len(self.asked), None) or self._next_trouble(request)
        self.asked.append(Request(request.method, request.path))
        if trouble is Trouble.BUSY:
            return _status(503, "ServiceUnavailable", "the server is currently unable to handle the request")
        try:
            answer = await self._do(request)
        except Refused as refused:
            answer = _status(refused.status, refused.reason, str(refused))
        if trouble is Trouble.BROKEN:
            return _status(500, "InternalError", "etcdserver: request timed out")
        if trouble is Trouble.STALLED:
            await self._stalled.wait()
        if trouble is not None:
            assert request.transport is not None
            request.transport.abort()
        return answer

    def _next_trouble(self, request: web.Request) -> Trouble | None:
        for place, (method, part, trouble) in enumerate(self._troubles):
            if method == request.method and part in request.path:
                del self._troubles[place]
                return trouble
        return None

    async def _do(self, request: web.Request) -> web.StreamResponse:
        where, store = request.match_info, self.cluster.store
        kind, name = where["kind"], where.get("name")
        self._authorize(request, kind, name)
        if where.get("group", GROUPS[kind]) != GROUPS[kind] or (
            kind == "leaderworkersets" and not self.cluster.groups_installed
        ):
            return web.Response(status=404, text="404 page not found\n")
        if kind != "nodes" and where["namespace"] != NAMESPACE and request.method == "POST":
            raise Refused(404, "NotFound", f'namespaces "{where["namespace"]}" not found')
        body: Mapping[str, Any] = await request.json() if request.body_exists else {}
        match request.method, name:
            case "GET", None:
                items = store.list(kind, request.query.get("labelSelector", ""))
                if where["namespace"] != NAMESPACE:
                    items = []
                return web.json_response(
                    {"kind": "List", "metadata": {"resourceVersion": store.version}, "items": items}
                )
            case "GET", str(name) if "part" in where:
                log = self.cluster.log(
                    store.get(kind, name), request.query["container"], request.query.get("previous") == "true"
                )
                lines = log.splitlines(keepends=True)[-int(request.query.get("tailLines", "1000000")) :]
                return web.Response(text="".join(lines))
            case "GET", str(name):
                return web.json_response(store.get(kind, name))
            case "POST", None:
                given = {**body, "metadata": {"namespace": where["namespace"], **body["metadata"]}}
                strict = request.query.get("fieldValidation") == "Strict"
                return web.json_response(store.create(kind, given, strict), status=201)
            case "PATCH", str(name):
                if request.content_type != "application/merge-patch+json":
                    raise Refused(415, "UnsupportedMediaType", f"got {request.content_type}")
                return web.json_response(store.patch(kind, name, body))
            case "DELETE", str(name):
                return web.json_response(store.delete(kind, name, body))
        raise Refused(405, "MethodNotAllowed", "the server does not allow this method on the requested resource")

    def _authorize(self, request: web.Request, kind: str, name: str | None) -> None:
        who = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if who == "admin":
            return
        if who != "deployer":
            raise Refused(401, "Unauthorized", "Unauthorized")
        verb = VERBS.get(request.method) or ("get" if name is not None else "list")
        part = request.match_info.get("part")
        resource, group = f"{kind}/{part}" if part else kind, GROUPS[kind]
        if not any(
            group in rule["apiGroups"] and resource in rule["resources"] and verb in rule["verbs"]
            for rule in self.rules
        ):
            full = f"{resource}.{group}" if group else resource
            user = f'User "system:serviceaccount:{NAMESPACE}:orchestrrl" cannot {verb} resource "{resource}"'
            where = f'in API group "{group}" in the namespace "{NAMESPACE}"'
            raise Refused(403, "Forbidden", f"{full} is forbidden: {user} {where}")


def _status(code: int, reason: str, message: str) -> web.Response:
    body = {"kind": "Status", "apiVersion": "v1", "status": "Failure"}
    return web.json_response({**body, "message": message, "reason": reason, "code": code}, status=code)


def _rules() -> list[dict[str, list[str]]]:
    return [rule for made in yaml.safe_load_all(MANIFEST.read_text()) for rule in made.get("rules", [])]
