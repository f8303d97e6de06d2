"""The emulator `restconf`: a Polatis switch's RESTCONF server, as far as cross-connects and ports go.

Statuses are those that clients of real switches report (see ocs_drivers/restconf.py); what RFC 8040 says and no client
has reported is done as the RFC says. PUT of the whole collection is here though our driver has it not: others may use
it beside it.
"""

import json
import re
from collections.abc import Awaitable, Sequence
from typing import Any

from aiohttp import web

from ocs_drivers import polatis_yang as yang
from ocs_drivers.base import DeviceClock
from ocs_drivers.emulators.base import DevicePanel, EmulatedDevice
from ocs_drivers.emulators.http import EmulatedHttpServer, EmulatedReply, is_let_in, shown
from ocs_drivers.emulators.polatis import STARTUP, cross_connects_container, polatis_facts, state_containers
from ocs_drivers.errors import DriverPermanent
from ocs_drivers.faults import DeviceFaultKind
from ocs_drivers.model import Action, CrossConnect, DeviceCircuit
from ocs_drivers.options import CheckedOptions, Flag, YamlText

MEDIA_TYPE = "application/yang-data+json"
YANG_PATCH_TYPE = "application/yang-patch+json"
ROOT = "/api"
COLLECTION = f"{ROOT}/data/{yang.MODULE}:cross-connects"


class RestconfRefusal(Exception):
    """An answer with `ietf-restconf:errors`."""

    def __init__(self, status: int, tag: str, message: str) -> None:
        super().__init__(message)
        error = {"error-type": "application", "error-tag": tag, "error-message": message}
        self.reply = EmulatedReply(status, {"ietf-restconf:errors": {"error": [error]}})


class RestconfQuirks(CheckedOptions):
    """`revision` of the model (before 2017-08-04 lists are `pairs` and ports are elsewhere); `yang_library` False: the
    switch does not tell it; `yang_patch` False: it has none; `any_to_any`: one range of ports; `power`: measures light;
    `chunked` answers; `lists_late`: pairs are listed once their mirrors are in place; `one_request`: a second one at
    the same time is answered 503; `user` and `password`: Basic authentication."""

    revision: YamlText = "2018-03-22"
    yang_library: Flag = True
    yang_patch: Flag = True
    any_to_any: Flag = False
    power: Flag = False
    chunked: Flag = False
    lists_late: Flag = False
    one_request: Flag = False
    user: YamlText = ""
    password: YamlText = ""


class RestconfEmulator(EmulatedHttpServer):
    """A switch with `RestconfQuirks`."""

    def __init__(self, panel: DevicePanel, clock: DeviceClock | None = None, **quirks: Any) -> None:
        self._quirks = RestconfQuirks.read(quirks, prefix="")
        super().__init__(MEDIA_TYPE, chunked=self._quirks.chunked)
        self.device = EmulatedDevice(polatis_facts(panel, self._quirks.any_to_any), panel, clock)
        self._under_way = 0
        self._pairs = yang.pair_list(self._quirks.revision)

    async def answer(self, request: web.Request, body: bytes) -> EmulatedReply:
        self._under_way += 1
        try:
            if not is_let_in(request, self._quirks.user, self._quirks.password):
                return EmulatedReply(401, None, {"WWW-Authenticate": 'Basic realm="Polatis"'})
            if self._quirks.one_request and self._under_way > 1:
                raise RestconfRefusal(503, "in-use", "another request is under way")
            if request.content_type == YANG_PATCH_TYPE and self._quirks.yang_patch:
                return await self._patched(request.method, request.path, body)
            return await self._dispatch(request.method, request.path, body)
        except RestconfRefusal as refused:
            return refused.reply
        finally:
            self._under_way -= 1

    async def _dispatch(self, method: str, path: str, body: bytes) -> EmulatedReply:
        if path == f"{ROOT}/operations/{yang.MODULE}:port-set-state" and method == "POST":
            return await self._set_ports(body)
        if path == COLLECTION:
            return await self._of_collection(method, body)
        if found := re.fullmatch(re.escape(f"{COLLECTION}/{self._pairs}=") + "([0-9]{1,5})", path):
            return await self._of_pair(method, int(found[1]))
        if method != "GET":
            raise RestconfRefusal(405, "operation-not-supported", f"{method} is not for this resource")
        return self._read(path.removeprefix(f"{ROOT}/data/"))

    async def _of_collection(self, method: str, body: bytes) -> EmulatedReply:
        match method:
            case "GET":
                pairs = [circuit.cross_connect for circuit in self.device.model.listed(late=self._quirks.lists_late)]
                container = cross_connects_container(pairs, self._quirks.revision)
                content = {f"{yang.MODULE}:{name}": entries for name, entries in container.items()}
                return EmulatedReply(200, content) if pairs else EmulatedReply(204)
            case "POST":
                pairs = self._parsed(body, self._pairs)
                if len(pairs) != 1:
                    raise RestconfRefusal(400, "invalid-value", "a POST creates exactly one resource")
                if any(circuit.cross_connect.ingress_port == pairs[0].ingress_port for circuit in self._circuits()):
                    raise RestconfRefusal(409, "data-exists", f"port {pairs[0].ingress_port} is connected")
                await self._set(Action.ADD, pairs, f"POST {shown(pairs)}")
                return EmulatedReply(201, None, {"Location": f"{COLLECTION}/{self._pairs}={pairs[0].ingress_port}"})
            case "PATCH":
                pairs = self._parsed(body, "cross-connects")
                await self._set(Action.ADD, pairs, f"PATCH {shown(pairs)}")
                return EmulatedReply(204)
            case "PUT":
                pairs = self._parsed(body, "cross-connects")
                await self._carry_out(self.device.replace(pairs, f"PUT {shown(pairs)}"))
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
        await self._set(action, pairs, f"YANG-PATCH {action} {shown(pairs)}")
        status = {"patch-id": patch.get("patch-id") if isinstance(patch, dict) else "", "ok": [None]}
        return EmulatedReply(200, {"ietf-yang-patch:yang-patch-status": status})

    async def _of_pair(self, method: str, ingress: int) -> EmulatedReply:
        present = [c.cross_connect for c in self._circuits() if c.cross_connect.ingress_port == ingress]
        if not present:
            raise RestconfRefusal(404, "invalid-value", f"port {ingress} is not connected")
        if method == "DELETE":
            # One circuit cannot be taken in part: that fault waits for a command of several.
            partial = self.device.model.taken(DeviceFaultKind.PARTIAL_COMMIT)
            try:
                await self._set(Action.REMOVE, present, f"DELETE {shown(present)}")
            finally:
                if partial is not None:
                    self.device.inject(partial)
            return EmulatedReply(204)
        if method == "GET":
            entry = {"ingress": ingress, "egress": present[0].egress_port}
            return EmulatedReply(200, {f"{yang.MODULE}:{self._pairs}": entry})
        raise RestconfRefusal(405, "operation-not-supported", f"{method} is not for this resource")

    def _read(self, name: str) -> EmulatedReply:
        self.device.model.advance()
        containers = state_containers(self.device, self._quirks.revision, has_monitors=self._quirks.power)
        found: dict[str, object] = {f"{yang.MODULE}:{each}": content for each, content in containers.items()}
        mode = STARTUP.get(self.device.facts.boot, "MODE_PRESERVE")
        startup = f"{yang.POLATIS_MODULE}:startup-mode"
        monitored = "ietf-restconf-monitoring:restconf-state/capabilities"
        if self._quirks.yang_library:
            module = {"name": yang.MODULE, "revision": self._quirks.revision, "namespace": yang.NAMESPACE}
            found["ietf-yang-library:modules-state"] = {"module-set-id": "1", "module": [module]}
            told = ["urn:ietf:params:restconf:capability:depth:1.0"]
            told += ["urn:ietf:params:restconf:capability:yang-patch:1.0"] * self._quirks.yang_patch
            found[monitored] = {"capability": told}
        if name == f"{yang.MODULE}:system-config/{startup}":
            return EmulatedReply(200, {startup: mode})
        if name not in found:
            raise RestconfRefusal(404, "invalid-value", f"no such resource: {name[:80]}")
        return EmulatedReply(200, {name.replace("restconf-state/", ""): found[name]})

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


def _json(body: bytes) -> object:
    try:
        value: object = json.loads(body)
    except (ValueError, RecursionError):
        raise RestconfRefusal(400, "malformed-message", "the body is not JSON") from None
    return value
