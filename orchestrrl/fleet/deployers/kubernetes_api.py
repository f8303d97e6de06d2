"""Requests to a Kubernetes API server through the official client, and what their failures mean.

Objects are dicts as the API has them, not the client's models: what a newer server or a user's pod template says that
the client does not know is neither lost nor refused. That they fit the models is the tests' business. The client comes
with `orchestrrl[kubernetes]`.
"""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
from kubernetes.aio import client
from kubernetes.aio import config as untyped_config
from kubernetes.aio.client.exceptions import ApiException

from orchestrrl.core.errors import OutcomeUnknown, Permanent, Retryable

config: Any = untyped_config

MANIFEST = "deploy/kubernetes/rbac.yaml"
MERGE_PATCH = "application/merge-patch+json"
RETRY_AFTER_S = 1.0
READ_AGAIN_S = (0.1, 0.4)  # a server that is replaced, or a connection that broke, is no news


class ResourceNotFound(Permanent):
    """404: there is no such object, or no such kind of object."""


class ResourceConflict(Permanent):
    """409: it is there already, or is not any more as it was read."""


class KubernetesApi:
    """Connects at the first request. `where` names the server in messages."""

    def __init__(self, kubeconfig: str | None, context: str | None, timeout_s: float) -> None:
        self._kubeconfig = kubeconfig
        self._context = context
        self._timeout_s = timeout_s
        self._client: Any = None
        self._connecting = asyncio.Lock()

    async def get(self, path: str, query: Mapping[str, str] | None = None) -> Any:
        """The object or list. Raises NotFound; Retryable where the server cannot be reached."""
        for pause_s in READ_AGAIN_S:
            try:
                return json.loads(await self._request("GET", path, query))
            except Retryable:
                await asyncio.sleep(pause_s)
        return json.loads(await self._request("GET", path, query))

    async def text(self, path: str, query: Mapping[str, str]) -> str:
        return (await self._request("GET", path, query)).decode(errors="replace")

    async def create(self, path: str, body: Mapping[str, Any]) -> Any:
        """As it was made. Unknown fields are refused. Raises Conflict where its name is taken."""
        return json.loads(await self._request("POST", path, {"fieldValidation": "Strict"}, body))

    async def patch(self, path: str, body: Mapping[str, Any]) -> Any:
        """A merge patch (RFC 7386); with a resourceVersion in it, raises Conflict where that has passed."""
        return json.loads(await self._request("PATCH", path, None, body, MERGE_PATCH))

    async def delete(self, path: str, body: Mapping[str, Any]) -> None:
        """Asks for it: what hangs on it and has finalizers is there a while longer."""
        await self._request("DELETE", path, None, body)

    async def close(self) -> None:
        connected, self._client = self._client, None
        if connected is not None:
            await connected.close()

    async def _request(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        content_type: str = "application/json",
    ) -> bytes:
        async with self._connecting:
            if self._client is None:
                self._client = await self._connect()
            connected = self._client
        headers = {"Accept": "application/json, */*", "Content-Type": content_type}
        request = await connected.param_serialize(
            method,
            path,
            query_params=list((query or {}).items()),
            header_params=headers,
            body=dict(body) if body is not None else None,
            auth_settings=["BearerToken"],
        )
        limit = aiohttp.ClientTimeout(total=self._timeout_s, sock_connect=self._timeout_s / 2)
        what = f"{method} {path}"
        try:
            response = await connected.call_api(*request, _request_timeout=limit)
            content: bytes = await response.read()
        except aiohttp.ClientSSLError as error:
            raise Permanent(f"the Kubernetes API server is not who it should be: {error}") from error
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise Retryable(f"the Kubernetes API server cannot be reached: {error}", RETRY_AFTER_S) from error
        except (aiohttp.ClientError, TimeoutError) as error:
            why = f"{what} got no answer from the Kubernetes API server: {error or type(error).__name__}"
            raise (Retryable(why, RETRY_AFTER_S) if method == "GET" else OutcomeUnknown(why)) from error
        except ApiException as error:
            raise Permanent(f"{what} could not be sent: {error.reason}") from error
        if not 200 <= response.status < 300:
            raise _refusal(method, path, response.status, response.headers, content)
        return content

    async def _connect(self) -> Any:
        # Made so, it does not start from what others in this process have set as default.
        settings = client.Configuration()
        try:
            if self._kubeconfig is None:
                config.load_incluster_config(client_configuration=settings)
            else:
                await config.load_kube_config(
                    config_file=str(Path(self._kubeconfig).expanduser()),
                    context=self._context,
                    client_configuration=settings,
                    persist_config=False,
                )
        except (config.ConfigException, OSError, ValueError) as error:
            where = "no kubeconfig is given" if self._kubeconfig is None else self._kubeconfig
            raise Permanent(f"cannot tell how to reach Kubernetes: {where}: {error}") from error
        return client.ApiClient(configuration=settings)


def _refusal(method: str, path: str, status: int, headers: Mapping[str, str], content: bytes) -> Exception:
    """What an answer other than 2xx means. The Status object in it has the server's words."""
    try:
        told = json.loads(content)
    except ValueError:
        told = None
    message, reason = content[:500].decode(errors="replace").strip(), ""
    if isinstance(told, dict):
        message, reason = str(told.get("message", "")), str(told.get("reason", ""))
    said = f"{method} {path} was answered with {status}: {message}"
    if status == 404:
        return ResourceNotFound(message)
    if status == 409:
        return ResourceConflict(message)
    if status == 403 and "exceeded quota" not in message:
        return Permanent(f"a right is missing: {message}; {MANIFEST} has those that are needed")
    if status == 401:
        return Permanent(f"the Kubernetes API server does not accept the credentials: {message}")
    if status >= 500 and status != 503 and method != "GET":
        return OutcomeUnknown(said)  # what the server could not do may have been stored all the same
    if status in (403, 429) or status >= 500:
        after_s = headers.get("Retry-After", "")
        return Retryable(said, float(after_s) if after_s.isdecimal() else RETRY_AFTER_S)
    return Permanent(f"{said} ({reason})" if reason else said)
