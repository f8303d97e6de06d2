"""Send requests to a Kubernetes API server through the official client, and convert its failures to OrchestrRL's
errors.

Objects are dicts as in the API, not the client's models. Therefore, the client preserves and accepts fields that it
does not define, such as those of a newer server or of a user's pod template. Tests check that the dicts fit the models.
The client is installed with `orchestrrl[kubernetes]`.
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
READ_AGAIN_S = (0.1, 0.4)  # pauses between reads, e.g. while a server is replaced


class ResourceNotFound(Permanent):
    """Raised for HTTP status 404, which means that the object or its kind does not exist."""


class ResourceConflict(Permanent):
    """Raised for HTTP status 409, which means that the object exists already or has changed since it was read."""


class KubernetesApi:
    """A client of one API server. It connects at the first request."""

    def __init__(self, kubeconfig: str | None, context: str | None, timeout_s: float) -> None:
        self._kubeconfig = kubeconfig
        self._context = context
        self._timeout_s = timeout_s
        self._client: Any = None
        self._connecting = asyncio.Lock()

    async def get(self, path: str, query: Mapping[str, str] | None = None) -> Any:
        """Return the object or list at this path. Raises ResourceNotFound if it does not exist, and Retryable if the
        server cannot be reached after several attempts."""
        for pause_s in READ_AGAIN_S:
            try:
                return json.loads(await self._request("GET", path, query))
            except Retryable:
                await asyncio.sleep(pause_s)
        return json.loads(await self._request("GET", path, query))

    async def text(self, path: str, query: Mapping[str, str]) -> str:
        return (await self._request("GET", path, query)).decode(errors="replace")

    async def create(self, path: str, body: Mapping[str, Any]) -> Any:
        """Create an object and return it. The server refuses unknown fields. Raises ResourceConflict if an object of
        the same name exists."""
        return json.loads(await self._request("POST", path, {"fieldValidation": "Strict"}, body))

    async def patch(self, path: str, body: Mapping[str, Any]) -> Any:
        """Apply a merge patch (RFC 7386) and return the object. Raises ResourceConflict if the patch contains a
        resourceVersion that is no longer current."""
        return json.loads(await self._request("PATCH", path, None, body, MERGE_PATCH))

    async def delete(self, path: str, body: Mapping[str, Any]) -> None:
        """Request the deletion of an object. The object and its dependents may continue to exist until their finalizers
        have run."""
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
            raise Permanent(f"cannot establish a TLS connection to the Kubernetes API server: {error}") from error
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise Retryable(f"the Kubernetes API server cannot be reached: {error}", RETRY_AFTER_S) from error
        except (aiohttp.ClientError, TimeoutError) as error:
            why = f"{what} got no answer from the Kubernetes API server: {str(error) or type(error).__name__}"
            raise (Retryable(why, RETRY_AFTER_S) if method == "GET" else OutcomeUnknown(why)) from error
        except ApiException as error:
            raise Permanent(f"cannot send {what} to the Kubernetes API server: {error.reason}") from error
        if not 200 <= response.status < 300:
            raise _refusal(method, path, response.status, response.headers, content)
        return content

    async def _connect(self) -> Any:
        # A new object ignores defaults that other code in this process has set.
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
            where = (
                "the pod's service account, as no kubeconfig is set" if self._kubeconfig is None else self._kubeconfig
            )
            raise Permanent(f"cannot configure access to Kubernetes with {where}: {error}") from error
        return client.ApiClient(configuration=settings)


def _refusal(method: str, path: str, status: int, headers: Mapping[str, str], content: bytes) -> Exception:
    """Return the exception for a response with a status other than 2xx. If the response contains a Status object, the
    exception has the message of this object."""
    try:
        status_object = json.loads(content)
    except ValueError:
        status_object = None
    message, reason = content[:500].decode(errors="replace").strip(), ""
    if isinstance(status_object, dict):
        message, reason = str(status_object.get("message", "")), str(status_object.get("reason", ""))
    text = f"{method} {path} was answered with {status}: {message}"
    if status == 404:
        return ResourceNotFound(message)
    if status == 409:
        return ResourceConflict(message)
    if status == 403 and "exceeded quota" not in message:
        return Permanent(f"permission denied: {message}; {MANIFEST} lists the permissions needed")
    if status == 401:
        return Permanent(f"the Kubernetes API server does not accept the credentials: {message}")
    if status >= 500 and status != 503 and method != "GET":
        return OutcomeUnknown(text)  # the change may have been stored even so
    if status in (403, 429) or status >= 500:
        after_s = headers.get("Retry-After", "")
        return Retryable(text, float(after_s) if after_s.isdecimal() else RETRY_AFTER_S)
    return Permanent(f"{text} ({reason})" if reason else text)
