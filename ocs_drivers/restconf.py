"""The driver `restconf` for Polatis switches, which uses their YANG model over RESTCONF (RFC 8040, TCP port 8008).

The protocol is known from working clients, not from a manual. Circuits have the path
`/api/data/optical-switch:cross-connects[/pair=<ingress>]`. Requests use Basic authentication and the media type
`application/yang-data+json`. If there are no cross-connects, the response is 204. POST of a pair returns 201, or 409 if
a port of the pair is in use. DELETE of a pair returns 204, or 404 if it does not exist.

Methods to set circuits (`change_with`):

- `yang_patch`: one request for any number of pairs, with YANG Patch (RFC 8072). Its `create` is refused if an ingress
  port is in use, and its edits take effect all together or not at all. `auto`, the default, uses this method if the
  server announces it.
- `patch`: all pairs are added by one plain PATCH of the collection. By RFC 8040, 4.6.1, a plain PATCH creates and
  updates children and deletes none, so circuits of other clients stay. PATCH has no conflict check: an ingress port
  that another client connected after the last reading is re-routed. PATCH cannot delete, so each removal is a separate
  request. `auto` uses this method if the server does not announce YANG Patch.
- `single`: a POST or DELETE for each circuit. A POST creates an entry, so it is refused if the ingress port is in use.
  By RFC 8040, 4.4.1, it creates a single child, so there is no bulk POST.

The driver never uses PUT of the collection, which replaces it and removes circuits that other clients connected since
the last reading, nor DELETE of the collection. A pair is deleted by its ingress port.

It is not known whether these switches support YANG Patch, nor what the result of a patch is if mirrors fail. A pair may
be listed before its mirrors are in place, so it is considered tuned only when the time in the option
`reconfiguration_s` has passed since the command. The option `yang_revision` can be used if `yang-library` is at another
path. A public lab tool reports that circuits set by POST disappear after a few seconds.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from itertools import chain
from typing import Annotated

from ocs_drivers import polatis_yang as yang
from ocs_drivers.base import DeviceClock
from ocs_drivers.errors import SHOWN_CHARACTERS, shown
from ocs_drivers.http_session import (
    DeviceResponse,
    HttpOptions,
    HttpSession,
    Scheme,
    check_status,
    parse_json,
    read_answer,
)
from ocs_drivers.model import Action, CrossConnect, SwitchCapabilities
from ocs_drivers.options import ConfiguredSwitch, Flag, SecondsOr0, must_be

DEFAULT_PORT = 8008
RECONFIGURATION_S = 0.025  # piezo (Polatis), the paper's table 2
MEDIA_TYPE = "application/yang-data+json"
COLLECTION = f"/data/{yang.MODULE}:{yang.CROSS_CONNECTS}"
YANG_LIBRARY = "/data/ietf-yang-library:modules-state"
YANG_PATCH = "urn:ietf:params:restconf:capability:yang-patch:1.0"
YANG_PATCH_TYPE = "application/yang-patch+json"
CAPABILITIES = "/data/ietf-restconf-monitoring:restconf-state/capabilities"


class ChangeWith(StrEnum):
    AUTO = "auto"
    YANG_PATCH = "yang_patch"
    PATCH = "patch"
    SINGLE = "single"


def _is_root(value: object) -> bool:
    return isinstance(value, str) and value.startswith("/") and value.isascii() and not set(value) & set("?# %")


class RestconfOptions(HttpOptions):
    default_ports = dict.fromkeys(Scheme, DEFAULT_PORT)
    requests = 6

    root: Annotated[str, must_be("a path from /", _is_root)] = "/api"
    size: yang.Size | None = None
    yang_revision: yang.Revision | None = None
    change_with: ChangeWith = ChangeWith.AUTO
    power: Flag = False
    reconfiguration_s: SecondsOr0 = RECONFIGURATION_S


class RestconfWire(yang.PolatisWire):
    """Implements the operations of `base.SwitchWire` as HTTP requests. `open` reads the revision of the YANG model,
    which determines the paths of circuits."""

    def __init__(self, options: RestconfOptions, clock: DeviceClock, session: HttpSession | None = None) -> None:
        super().__init__(clock, options.size, options.reconfiguration_s, has_power=options.power)
        self._options = options
        self._root = options.root.rstrip("/")
        self.hint = f" at {self._root}: set the option `root`"
        self._revision = options.yang_revision or yang.PAIR_REVISION
        self._go(ChangeWith.PATCH if options.change_with is ChangeWith.AUTO else options.change_with)
        self._session = session or HttpSession(options, clock)

    async def open(self) -> None:
        await self._session.open()
        if not self._options.yang_revision:
            self._revision = revision(await self._get(YANG_LIBRARY)) or yang.PAIR_REVISION
        if self._options.change_with is ChangeWith.AUTO:
            # RFC 8040, 9.1
            listed = yang.found(yang.found(await self._get(CAPABILITIES), "capabilities"), "capability")
            self._go(ChangeWith.YANG_PATCH if isinstance(listed, list) and YANG_PATCH in listed else ChangeWith.PATCH)

    async def close(self) -> None:
        await self._session.close()

    async def read(self, containers: Mapping[str, Sequence[str]]) -> Mapping[str, object]:
        data: dict[str, object] = {}
        for name in containers:
            data |= await self._get(f"/data/{yang.MODULE}:{name}")
        return data

    async def set(self, action: Action, pairs: Sequence[CrossConnect]) -> None:
        listed = self.as_listed(action, pairs)
        with self._settling.commanding(action, pairs):
            match self._way, action:
                case ChangeWith.YANG_PATCH, _:
                    await self._yang_patch(action, listed)
                case _, Action.REMOVE:
                    for pair in listed:
                        await self._set("DELETE", f"{COLLECTION}/{self._list_name}={pair.ingress_port}")
                case ChangeWith.PATCH, _:
                    content = {f"{yang.MODULE}:cross-connects": {self._list_name: [_entry(pair) for pair in pairs]}}
                    await self._set("PATCH", COLLECTION, content)
                case _:
                    for pair in pairs:
                        await self._set("POST", COLLECTION, {f"{yang.MODULE}:{self._list_name}": [_entry(pair)]})

    def _go(self, way: ChangeWith) -> None:
        self._way = way
        self.capabilities = SwitchCapabilities(
            bulk=way is not ChangeWith.SINGLE,
            port_power=self._options.power,
            removes_one_by_one=way is ChangeWith.PATCH,
        )

    @property
    def _list_name(self) -> str:
        return yang.pair_list(self._revision)

    async def _yang_patch(self, action: Action, pairs: Sequence[CrossConnect]) -> None:
        """Send the pairs as one YANG Patch. Pairs are removed with operation `remove`, which, unlike `delete`, succeeds
        if a pair no longer exists."""
        is_add, edits = action is Action.ADD, []
        for number, pair in enumerate(pairs, start=1):
            edit: dict[str, object] = {"edit-id": str(number), "target": f"/{self._list_name}={pair.ingress_port}"}
            edit["operation"] = "create" if is_add else "remove"
            if is_add:
                edit["value"] = {f"{yang.MODULE}:{self._list_name}": [_entry(pair)]}
            edits.append(edit)
        content = {"ietf-yang-patch:yang-patch": {"patch-id": f"{action}-{len(edits)}", "edit": edits}}
        await self._set("PATCH", COLLECTION, content, YANG_PATCH_TYPE)

    async def _get(self, path: str) -> dict[str, object]:
        """Read the resource at a path. The result is empty if the switch does not have the resource. Raises a driver
        error if the request fails or the response does not contain the resource."""
        answer = await self._session.request("GET", self._root + path, headers={"Accept": MEDIA_TYPE})
        if answer.status == 204 or (answer.status == 404 and _errors(answer)):
            return {}

        def read(body: object) -> dict[str, object]:
            name = path.rpartition("/")[2].rpartition(":")[2]
            is_leaf = path.endswith(yang.STARTUP_MODE)  # optional among the facts
            if not isinstance(body, dict) or not (is_leaf or isinstance(yang.found(body, name), Mapping)):
                raise ValueError(f"the response must contain an object {name}, got {shown(body)}")
            return body

        return read_answer(answer, f"GET {self._root}{path}", read, text=_errors(answer))

    async def _set(self, method: str, path: str, content: object = None, media_type: str = MEDIA_TYPE) -> None:
        headers = {"Accept": MEDIA_TYPE} | ({} if content is None else {"Content-Type": media_type})
        answer = await self._session.request(
            method, self._root + path, content=content, headers=headers, is_setter=True
        )
        if method == "DELETE" and answer.status == 404 and _errors(answer):
            return  # already gone
        check_status(answer, f"{method} {self._root}{path}", is_setter=True, text=_errors(answer))


def _entry(pair: CrossConnect) -> dict[str, int]:
    return {"ingress": pair.ingress_port, "egress": pair.egress_port}


def _errors(answer: DeviceResponse) -> str:
    """Return the error messages in the body of a response, or "" if it contains none."""
    try:
        return errors(parse_json(answer.body))
    except ValueError:
        return ""


def revision(body: object) -> str:
    """Return the newest revision of module `optical-switch` in the yang-library (RFC 7895), or "" if the module is not
    listed."""
    library = yang.mapping(yang.found(body, "modules-state"), "modules-state")
    revisions = [
        yang.text_of(entry.get("revision", ""), "revision")
        for entry in yang.entries(library, "module")
        if entry.get("name") == yang.MODULE
    ]
    return max(filter(yang.is_revision, revisions), default="")


def errors(body: object) -> str:
    """Return the errors in an `ietf-restconf:errors` or `yang-patch-status` body as text, at most ten of them. Each has
    the form `tag: message: path`. Raises ValueError if the body contains no error."""
    status = yang.found(body, "yang-patch-status")
    edits = yang.found(status, "edit-status")
    holders = [*yang.entries(edits, "edit"), status] if isinstance(edits, Mapping) else [status or body]
    told = []
    listed = (yang.mapping(yang.found(holder, "errors"), "errors") for holder in holders)
    for entry in chain.from_iterable(yang.entries(each, "error") for each in listed):
        parts = [entry.get(name) for name in ("error-tag", "error-message", "error-path")]
        told.append(": ".join(part[:SHOWN_CHARACTERS] for part in parts if isinstance(part, str) and part))
    if not any(told):
        raise ValueError("the error response must contain at least one error")
    return "; ".join(told[:10])


class RestconfSwitch(ConfiguredSwitch, options=RestconfOptions, wire=RestconfWire):
    """The driver `restconf` for a Polatis switch at `address`, which is `HOST` or `HOST:PORT`.

    `scheme` is http or https. The certificates in `tls_ca_file` (PEM) replace the system's authorities. `user` and
    `password` are used for Basic authentication, and `root` is the root path of the RESTCONF server. Set `size`, such
    as 16x16 or, for any-to-any, 32xCC, if the model name does not contain it. Set `yang_revision`, the revision of
    `optical-switch`, if the switch does not report it. The module's docstring explains `change_with`. Set `power` if
    the switch measures optical power.
    """

    async def capabilities(self) -> SwitchCapabilities:
        """Return the driver's capabilities. The method connects first, because support for bulk commands depends on the
        switch."""
        await self.facts()
        return await super().capabilities()
