"""The emulator `restconf`: a Polatis switch's RESTCONF server, as far as cross-connects and ports go.

Statuses are those that clients of real switches report (see ocs_drivers/restconf.py); what RFC 8040 says and no client
has reported is done as the RFC says. PUT and DELETE of the whole collection are here though our driver has neither:
others may use them beside it.
"""

import json
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import NoReturn

from aiohttp import web

from ocs_drivers import polatis_yang as yang
from ocs_drivers.base import DeviceClock
from ocs_drivers.emulators.base import DevicePanel, EmulatedDevice
from ocs_drivers.emulators.http import EmulatedHttpServer, EmulatedReply, HttpListing, is_let_in
from ocs_drivers.emulators.polatis import polatis_facts
from ocs_drivers.errors import DriverPermanent
from ocs_drivers.faults import DeviceFaultKind
from ocs_drivers.model import Action, BootBehaviour, CrossConnect, DeviceCircuit, PortStatus

MEDIA_TYPE = "application/yang-data+json"
YANG_PATCH_TYPE = "application/yang-patch+json"
ROOT = "/api"
COLLECTION = f"{ROOT}/data/{yang.MODULE}:cross-connects"
STARTUP_MODES = {BootBehaviour.DARK: "MODE_VOLATILE", BootBehaviour.RESTORE: "MODE_PRESERVE"}


class RestconfRefusal(Exception):
    """An answer with `ietf-restconf:errors`."""

    def __init__(self, status: int, tag: str, message: str) -> None:
        super().__init__(message)
        error = {"error-type": "application", "error-tag": tag, "error-message": message}
        self.reply = EmulatedReply(status, {"ietf-restconf:errors": {"error": [error]}})


class RestconfEmulator:
    """Quirks: `revision` of the model (before 2017-08-04 lists are `pairs` and ports are elsewhere); `yang_library`
    False: the switch does not tell it; `yang_patch` False: it has none; `any_to_any`: one range of ports; `power`:
    measures light; `chunked` answers; `lists_late`: pairs are listed once their mirrors are in place; `one_request`: a
    second one at the same time is answered 503; `user` and `password`: Basic authentication."""

    def __init__(
        self,
        panel: DevicePanel,
        clock: DeviceClock | None = None,
        *,
        revision: str = "2018-03-22",
        yang_library: bool = True,
        yang_patch: bool = True,
        any_to_any: bool = False,
        power: bool = False,
        chunked: bool = False,
        lists_late: bool = False,
        one_request: bool = False,
        user: str = "",
        password: str = "",
    ) -> None:
        self.device = EmulatedDevice(polatis_facts(panel, any_to_any), panel, clock)
        self._listing = HttpListing(self.device, panel.reconfiguration_s + panel.jitter_s, late=lists_late)
        self._server = EmulatedHttpServer(self._answer, MEDIA_TYPE, chunked=chunked)
        self._revision = revision
        self._yang_library = yang_library
        self._yang_patch = yang_patch
        self._power = power
        self._one_request = one_request
        self._under_way = 0
        self._user = (user, password)
        self._pairs = yang.pair_list(revision)

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        return await self._server.start(host, port)

    async def stop(self) -> None:
        await self._server.stop()

    async def _answer(self, request: web.Request, body: bytes) -> EmulatedReply:
        self._under_way += 1
        try:
            if not is_let_in(request, *self._user):
                return EmulatedReply(401, None, {"WWW-Authenticate": 'Basic realm="Polatis"'})
            if self._one_request and self._under_way > 1:
                raise RestconfRefusal(503, "in-use", "another request is under way")
            if request.content_type == YANG_PATCH_TYPE and self._yang_patch:
                return await self._patched(request.method, request.path, body)
            return await self._dispatch(request.method, request.path, body)
        except RestconfRefusal as refused:
            return refused.reply
        finally:
            self._under_way -= 1

    async def _dispatch(self, method: str, path: str, body: bytes) -> EmulatedReply:
        if path == ROOT:
            return EmulatedReply(200, {"ietf-restconf:restconf": {"data": {}, "operations": {}}})
        if path == f"{ROOT}/operations/{yang.MODULE}:port-set-state" and method == "POST":
            return await self._set_ports(body)
        collection = COLLECTION
        if path == collection:
            return await self._of_collection(method, body)
        if found := re.fullmatch(re.escape(f"{collection}/{self._pairs}=") + "([0-9]{1,5})", path):
            return await self._of_pair(method, int(found[1]), body)
        if method != "GET":
            raise RestconfRefusal(405, "operation-not-supported", f"{method} is not for this resource")
        return self._read(path.removeprefix(f"{ROOT}/data/"))

    async def _of_collection(self, method: str, body: bytes) -> EmulatedReply:
        match method:
            case "GET":
                entries = [_entry(circuit.cross_connect) for circuit in self._listing.circuits()]
                return (
                    EmulatedReply(200, self._named("cross-connects", {self._pairs: entries}))
                    if entries
                    else EmulatedReply(204)
                )
            case "POST":
                pairs = self._parsed(body, self._pairs)
                if len(pairs) != 1:
                    raise RestconfRefusal(400, "invalid-value", "a POST creates exactly one resource")
                if any(circuit.cross_connect.ingress_port == pairs[0].ingress_port for circuit in self._circuits()):
                    raise RestconfRefusal(409, "data-exists", f"port {pairs[0].ingress_port} is connected")
                await self._set(Action.ADD, pairs, f"POST {_shown(pairs)}")
                return EmulatedReply(201, None, {"Location": f"{COLLECTION}/{self._pairs}={pairs[0].ingress_port}"})
            case "PATCH":
                pairs = self._parsed(body, "cross-connects")
                await self._set(Action.ADD, pairs, f"PATCH {_shown(pairs)}")
                return EmulatedReply(204)
            case "PUT":
                pairs = self._parsed(body, "cross-connects")
                self._listing.commanded(pairs)
                await self._carry_out(self.device.replace(pairs, f"PUT {_shown(pairs)}"))
                return EmulatedReply(204)
            case "DELETE":
                await self._carry_out(self.device.replace((), "DELETE all"))
                return EmulatedReply(204)
        raise RestconfRefusal(405, "operation-not-supported", f"{method} is not for this resource")

    async def _patched(self, method: str, path: str, body: bytes) -> EmulatedReply:
        """RFC 8072: all edits or none, as far as the mirrors go along."""
        if (method, path) != ("PATCH", COLLECTION):
            raise RestconfRefusal(405, "operation-not-supported", "a YANG Patch is for the collection here")
        value = _json(body)
        patch = value.get("ietf-yang-patch:yang-patch") if isinstance(value, dict) else None
        edits = patch.get("edit") if isinstance(patch, dict) else None
        if not isinstance(edits, list) or not edits or not all(isinstance(edit, dict) for edit in edits):
            raise RestconfRefusal(400, "malformed-message", "must hold a list of edits")
        added, removed = [], []
        present = {circuit.cross_connect.ingress_port: circuit.cross_connect for circuit in self._circuits()}
        for edit in edits:
            found = re.fullmatch(rf"/(?:{yang.MODULE}:)?{self._pairs}=([0-9]{{1,5}})", str(edit.get("target")))
            if found is None:
                raise RestconfRefusal(400, "invalid-value", f"no such target: {edit.get('target')}")
            ingress = int(found[1])
            match edit.get("operation"):
                case "create" if ingress in present:
                    raise RestconfRefusal(409, "data-exists", f"port {ingress} is connected")
                case "create":
                    added += self._parsed(json.dumps(edit.get("value")).encode(), self._pairs)
                case "delete" if ingress not in present:
                    raise RestconfRefusal(409, "data-missing", f"port {ingress} is not connected")
                case "remove" | "delete":
                    removed += [present[ingress]] if ingress in present else []
                case other:
                    raise RestconfRefusal(400, "operation-not-supported", f"{other} is not done here")
        if added and removed:
            raise RestconfRefusal(
                400, "operation-not-supported", "edits that add and edits that remove are two patches here"
            )
        action, pairs = (Action.ADD, added) if added else (Action.REMOVE, removed)
        await self._set(action, pairs, f"YANG-PATCH {action} {_shown(pairs)}")
        status = {"patch-id": patch.get("patch-id") if isinstance(patch, dict) else "", "ok": [None]}
        return EmulatedReply(200, {"ietf-yang-patch:yang-patch-status": status})

    async def _of_pair(self, method: str, ingress: int, body: bytes) -> EmulatedReply:
        present = [c.cross_connect for c in self._circuits() if c.cross_connect.ingress_port == ingress]
        if method == "PUT":
            pairs = self._parsed(body, self._pairs)
            if [pair.ingress_port for pair in pairs] != [ingress]:
                raise RestconfRefusal(400, "invalid-value", "the body is not the resource that the path names")
            await self._set(Action.ADD, pairs, f"PUT {_shown(pairs)}")
            return EmulatedReply(204 if present else 201)
        if not present:
            raise RestconfRefusal(404, "invalid-value", f"port {ingress} is not connected")
        if method == "DELETE":
            # One circuit cannot be taken in part: that fault waits for a command of several.
            partial = self.device.model.taken(DeviceFaultKind.PARTIAL_COMMIT)
            try:
                await self._set(Action.REMOVE, present, f"DELETE {_shown(present)}")
            finally:
                if partial is not None:
                    self.device.inject(partial)
            return EmulatedReply(204)
        if method == "GET":
            return EmulatedReply(200, self._named(self._pairs, _entry(present[0])))
        raise RestconfRefusal(405, "operation-not-supported", f"{method} is not for this resource")

    def _read(self, name: str) -> EmulatedReply:
        facts, is_new = self.device.facts, yang.has_port_config(self._revision)
        readers: dict[str, Callable[[], object]] = {
            f"{yang.MODULE}:product-information": lambda: self._named(
                "product-information",
                {
                    "manufacturer": facts.vendor,
                    "serial-number": facts.serial,
                    "model-name": facts.model,
                    "software-version": facts.software,
                },
            ),
            f"{yang.MODULE}:port-config" if is_new else f"{yang.MODULE}:ports": self._ports,
            f"{yang.MODULE}:system-config/{yang.POLATIS_MODULE}:startup-mode": lambda: {
                f"{yang.POLATIS_MODULE}:startup-mode": STARTUP_MODES.get(facts.boot, "MODE_PRESERVE")
            },
        }
        if self._yang_library:
            readers["ietf-yang-library:modules-state"] = lambda: {
                "ietf-yang-library:modules-state": {
                    "module-set-id": "1",
                    "module": [{"name": yang.MODULE, "revision": self._revision, "namespace": yang.NAMESPACE}],
                }
            }
            readers["ietf-restconf-monitoring:restconf-state/capabilities"] = lambda: {
                "ietf-restconf-monitoring:capabilities": {
                    "capability": ["urn:ietf:params:restconf:capability:depth:1.0"]
                    + ["urn:ietf:params:restconf:capability:yang-patch:1.0"] * self._yang_patch
                }
            }
        if self._power and is_new:
            readers[f"{yang.MODULE}:opm-power"] = lambda: self._named(
                "opm-power",
                {"port": [{"port-id": p.port, "power": f"{p.power_dbm:.2f}"} for p in self.device.model.ports()]},
            )
        if name not in readers:
            raise RestconfRefusal(404, "invalid-value", f"no such resource: {name[:80]}")
        self.device.model.advance()
        return EmulatedReply(200, readers[name]())

    def _ports(self) -> object:
        if yang.has_port_config(self._revision):
            words = {PortStatus.ENABLED: "ENABLED", PortStatus.DISABLED: "DISABLED", PortStatus.FAILED: "FAILED"}
            entries = [
                {"port-id": port.port, "status": words[port.status], "label": "", "peer-port": ""}
                for port in self.device.model.ports()
            ]
            return self._named("port-config", {"port": entries})
        old = {PortStatus.ENABLED: "PO_ENABLED", PortStatus.DISABLED: "PO_DISABLED", PortStatus.FAILED: "PO_FAILED"}
        return self._named(
            "ports",
            {
                "port": [
                    {"port-id": port.port, "port-status": old[port.status]}
                    | ({"opm": {"power": f"{port.power_dbm:.2f}"}} if self._power else {})
                    for port in self.device.model.ports()
                ]
            },
        )

    async def _set_ports(self, body: bytes) -> EmulatedReply:
        rpc = _json(body)
        asked = rpc.get(f"{yang.MODULE}:input") if isinstance(rpc, dict) else None
        if not isinstance(asked, dict):
            raise RestconfRefusal(400, "malformed-message", f"must hold {yang.MODULE}:input")
        for name, is_enabled in (("port-disab", False), ("port-enab", True)):
            ports = asked.get(name, [])
            if not isinstance(ports, list) or any(port not in self._numbers for port in ports):
                raise RestconfRefusal(400, "invalid-value", f"{name}: no such port")
            if ports:
                await self._carry_out(self.device.enable(ports, is_enabled, f"{name} {ports}"))
        return EmulatedReply(204)

    @property
    def _numbers(self) -> set[int]:
        return {*self.device.facts.ingress_ports, *self.device.facts.egress_ports}

    async def _set(self, action: Action, pairs: Sequence[CrossConnect], command: str) -> None:
        self._listing.commanded(pairs)
        await self._carry_out(self.device.set(action, pairs, command))

    async def _carry_out(self, setter: Awaitable[None]) -> None:
        try:
            await setter
        except DriverPermanent as refusal:
            is_partial = " OF " in refusal.answer
            tag = "partial-operation" if is_partial else "resource-denied"
            raise RestconfRefusal(500 if is_partial else 409, tag, refusal.answer) from None

    def _circuits(self) -> Sequence[DeviceCircuit]:
        self.device.model.advance()
        return self.device.model.circuits()

    def _named(self, name: str, content: object) -> dict[str, object]:
        return {f"{yang.MODULE}:{name}": content}

    def _parsed(self, body: bytes, name: str) -> list[CrossConnect]:
        """The pairs of a body that holds the collection or entries of it."""
        value = _json(body)
        content = value.get(f"{yang.MODULE}:{name}", value.get(name)) if isinstance(value, dict) else None
        if name == "cross-connects" and isinstance(content, dict):
            content = content.get(self._pairs, [])
        entries = content if isinstance(content, list) else [content]
        return [self._pair(entry) for entry in entries]

    def _pair(self, entry: object) -> CrossConnect:
        try:
            if not isinstance(entry, dict) or set(entry) != {"ingress", "egress"}:
                raise ValueError("a pair has ingress and egress")
            pair = CrossConnect(yang.parse_port(entry["ingress"]), yang.parse_port(entry["egress"]))
        except ValueError as error:
            raise RestconfRefusal(400, "malformed-message", str(error)) from None
        facts = self.device.facts
        if pair.ingress_port not in facts.ingress_ports or pair.egress_port not in facts.egress_ports:
            raise RestconfRefusal(400, "invalid-value", f"no such cross-connect on this switch: {pair}")
        return pair


def _entry(pair: CrossConnect) -> dict[str, int]:
    return {"ingress": pair.ingress_port, "egress": pair.egress_port}


def _shown(pairs: Sequence[CrossConnect]) -> str:
    return " ".join(str(pair) for pair in pairs)


def _json(body: bytes) -> object:
    try:
        value: object = json.loads(body)
    except (ValueError, RecursionError):
        _malformed()
    return value


def _malformed() -> NoReturn:
    raise RestconfRefusal(400, "malformed-message", "the body is not JSON")
