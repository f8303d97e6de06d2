"""The emulator `restconf`, which implements the RESTCONF server of a Polatis switch for cross-connects and ports.

Status codes are those that clients of real switches report (see ocs_drivers/restconf.py) or, if clients report none,
those of RFC 8040. The driver does not use PUT of the whole collection. The emulator supports it, because other clients
of the same switch may use it.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from ocs_drivers import polatis_yang as yang
from ocs_drivers.base import DeviceClock
from ocs_drivers.emulators.base import DevicePanel, EmulatedDevice
from ocs_drivers.emulators.http import EmulatedHttpServer, EmulatedReply, is_let_in
from ocs_drivers.emulators.polatis import STARTUP, PolatisStore, YangRefusal, polatis_facts, state_containers
from ocs_drivers.errors import DriverPermanent
from ocs_drivers.faults import DeviceFaultKind
from ocs_drivers.options import CheckedOptions, Flag, YamlText

MEDIA_TYPE = "application/yang-data+json"
YANG_PATCH_TYPE = "application/yang-patch+json"
ROOT = "/api"
COLLECTION = f"{ROOT}/data/{yang.MODULE}:cross-connects"


STATUS = {"data-exists": 409, "data-missing": 409}  # by error-tag; the others are 400

Edit = tuple[str, Any, Any]  # operation, ingress, egress


class RestconfRefusal(YangRefusal):
    """Raised for a refusal with a specific HTTP status."""

    def __init__(self, status: int, tag: str, message: str) -> None:
        super().__init__(tag, message)
        self.status = status


class RestconfQuirks(CheckedOptions):
    """Configurable behaviour. `revision` is the revision of the model. In revisions before 2017-08-04, the list of
    cross-connects is called `pairs`, and ports are in another container. `yang_library` enables the YANG library, and
    `yang_patch` enables YANG Patch. If `any_to_any` is True, all ports form a single range. If `power` is True, optical
    power is measured. If `chunked` is True, answers are chunked. If `lists_late` is True, pairs are listed only when
    their mirrors are in place. If `one_request` is True, a concurrent request is answered with 503. If `user` is set,
    Basic authentication with `user` and `password` is required."""

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
    """An emulated Polatis switch, configured by `RestconfQuirks`."""

    def __init__(self, panel: DevicePanel, clock: DeviceClock | None = None, **quirks: Any) -> None:
        self._quirks = RestconfQuirks.read(quirks, prefix="")
        super().__init__(MEDIA_TYPE, chunked=self._quirks.chunked)
        self.device = EmulatedDevice(polatis_facts(panel, self._quirks.any_to_any), panel, clock)
        self._under_way = 0
        self._store = PolatisStore(self.device, self._quirks.revision, lists_late=self._quirks.lists_late)
        self._pairs = self._store.list_name

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
        except YangRefusal as refused:
            error = {"error-type": "application", "error-tag": refused.tag, "error-message": refused.message}
            status = refused.status if isinstance(refused, RestconfRefusal) else STATUS.get(refused.tag, 400)
            return EmulatedReply(status, {"ietf-restconf:errors": {"error": [error]}})
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
            raise RestconfRefusal(405, "operation-not-supported", f"{method} is not supported for this resource")
        return self._read(path.removeprefix(f"{ROOT}/data/"))

    async def _of_collection(self, method: str, body: bytes) -> EmulatedReply:
        match method:
            case "GET":
                ((name, listed),) = self._store.container().items()
                return (
                    EmulatedReply(200, {f"{yang.MODULE}:{name}": listed}) if listed[self._pairs] else EmulatedReply(204)
                )
            case "POST":
                pairs = self._parsed(_json(body), self._pairs)
                if len(pairs) != 1:
                    raise YangRefusal("invalid-value", "a POST creates exactly one resource")
                await self._edit(method, [("create", *pairs[0])])
                return EmulatedReply(201, None, {"Location": f"{COLLECTION}/{self._pairs}={pairs[0][0]}"})
            case "PATCH":
                await self._edit(method, [("merge", *pair) for pair in self._parsed(_json(body), "cross-connects")])
                return EmulatedReply(204)
            case "PUT":
                gone: list[Edit] = [("remove", ingress, None) for ingress in self._store.running()]
                new = self._parsed(_json(body), "cross-connects")
                await self._edit(method, [*gone, *(("merge", *pair) for pair in new)])
                return EmulatedReply(204)
        raise RestconfRefusal(405, "operation-not-supported", f"{method} is not supported for this resource")

    async def _patched(self, method: str, path: str, body: bytes) -> EmulatedReply:
        """Carry out a YANG Patch (RFC 8072). Unless a mirror fails, all edits of the patch take effect or none of them
        does."""
        if (method, path) != ("PATCH", COLLECTION):
            raise RestconfRefusal(405, "operation-not-supported", "YANG Patch is only supported for the collection")
        value = _json(body)
        patch = value.get("ietf-yang-patch:yang-patch") if isinstance(value, dict) else None
        listed = patch.get("edit") if isinstance(patch, dict) else None
        if not isinstance(patch, dict) or not isinstance(listed, list) or not listed:
            raise YangRefusal("malformed-message", "must hold a list of edits")
        edits: list[Edit] = []
        for edit in listed:
            target = str(edit.get("target")) if isinstance(edit, dict) else ""
            found = re.fullmatch(rf"/(?:{yang.MODULE}:)?{self._pairs}=([0-9]{{1,5}})", target)
            if found is None:
                raise YangRefusal("invalid-value", f"no such target: {target}")
            ends = self._parsed(edit["value"], self._pairs) if "value" in edit else [(int(found[1]), None)]
            edits += [(str(edit.get("operation")), *pair) for pair in ends]
        operations = dict.fromkeys(operation for operation, *_ in edits)
        await self._edit(f"YANG-PATCH {'+'.join(operations)}", edits)
        return EmulatedReply(
            200, {"ietf-yang-patch:yang-patch-status": {"patch-id": patch.get("patch-id"), "ok": [None]}}
        )

    async def _of_pair(self, method: str, ingress: int) -> EmulatedReply:
        if (egress := self._store.running().get(ingress)) is None:
            raise RestconfRefusal(404, "invalid-value", f"port {ingress} is not connected")
        if method == "DELETE":
            # A single circuit cannot be applied in part: keep that fault for a command with several.
            partial = self.device.taken(DeviceFaultKind.PARTIAL_COMMIT)
            try:
                await self._edit(method, [("delete", ingress, None)])
            finally:
                if partial is not None:
                    self.device.inject(partial)
            return EmulatedReply(204)
        if method == "GET":
            return EmulatedReply(200, {f"{yang.MODULE}:{self._pairs}": {"ingress": ingress, "egress": egress}})
        raise RestconfRefusal(405, "operation-not-supported", f"{method} is not supported for this resource")

    def _read(self, name: str) -> EmulatedReply:
        self.device.advance()
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
        if not isinstance(asked, dict) or not all(isinstance(ports, list) for ports in asked.values()):
            raise YangRefusal("malformed-message", f"must hold {yang.MODULE}:input, lists of ports")
        await self._store.set_ports(asked, f"port-set-state {asked}")
        return EmulatedReply(204)

    async def _edit(self, verb: str, edits: Sequence[Edit]) -> None:
        before = self._store.running()
        wanted = dict(before)
        for edit in edits:
            self._store.edit(wanted, *edit)
        command = " ".join((verb, *(f"{ingress}:{egress or before.get(ingress)}" for _, ingress, egress in edits)))
        try:
            await self._store.carry_out(before, wanted, command)
        except DriverPermanent as refusal:
            is_partial = " OF " in refusal.answer
            tag = "partial-operation" if is_partial else "resource-denied"
            raise RestconfRefusal(500 if is_partial else 409, tag, refusal.answer) from None

    def _parsed(self, value: object, name: str) -> list[tuple[object, object]]:
        """Return the (ingress, egress) ports of each pair in a body that contains the whole collection or some of its
        entries. `name` is the name of the body's outermost member. Raises YangRefusal if the body is malformed."""
        content = value.get(f"{yang.MODULE}:{name}", value.get(name)) if isinstance(value, dict) else None
        if name == "cross-connects" and isinstance(content, dict):
            content = content.get(self._pairs, [])
        pairs = []
        for entry in content if isinstance(content, list) else [content]:
            if not isinstance(entry, dict) or set(entry) != {"ingress", "egress"}:
                raise YangRefusal("malformed-message", "a pair has ingress and egress")
            pairs.append((entry["ingress"], entry["egress"]))
        return pairs


def _json(body: bytes) -> object:
    try:
        value: object = json.loads(body)
    except (ValueError, RecursionError):
        raise YangRefusal("malformed-message", "the body is not JSON") from None
    return value
