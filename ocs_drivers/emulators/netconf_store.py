"""The datastores of an emulated Polatis switch: its YANG tree as XML, and edits of its cross-connects.

The tree is made from the glass whenever somebody asks.
"""

from collections.abc import Mapping
from xml.etree.ElementTree import Element

from ocs_drivers import polatis_yang as yang
from ocs_drivers.emulators.base import EmulatedDevice
from ocs_drivers.emulators.http import HttpListing
from ocs_drivers.emulators.netconf_text import NC, RpcError, local, trees
from ocs_drivers.emulators.polatis import STARTUP, cross_connects_container, state_containers
from ocs_drivers.errors import DriverPermanent
from ocs_drivers.model import Action, CrossConnect

NS = f"{{{yang.NAMESPACE}}}"
POLATIS_NS = f"{{{yang.POLATIS_NAMESPACE}}}"
OPERATION = f"{NC}operation"


class NetconfDatastores:
    """`candidate` is None where there is none, and follows `running` until somebody edits it."""

    def __init__(
        self, device: EmulatedDevice, listing: HttpListing, revision: str, *, has_candidate: bool, has_monitors: bool
    ) -> None:
        self._device = device
        self._listing = listing
        self._revision = revision
        self._has_candidate = has_candidate
        self._has_monitors = has_monitors
        self._candidate: dict[int, int] | None = None
        self.locks: dict[str, int] = {}  # datastore: session that holds it

    def running(self) -> dict[int, int]:
        return {
            circuit.cross_connect.ingress_port: circuit.cross_connect.egress_port
            for circuit in self._device.model.circuits()
        }

    def config(self, source: str) -> list[Element]:
        """The tree of a datastore."""
        self._check_datastore(source)
        if source == "candidate" and self._candidate is not None:
            return [*self._cross_connects(self._candidate), self._system()]
        listed = {
            circuit.cross_connect.ingress_port: circuit.cross_connect.egress_port
            for circuit in self._listing.circuits()
        }
        return [*self._cross_connects(listed), self._system()]

    def state(self) -> list[Element]:
        """Everything, as <get> shows it."""
        containers = state_containers(self._device, self._revision, has_monitors=self._has_monitors)
        return [*self.config("running"), *trees(containers, yang.NAMESPACE)]

    def lock(self, target: str, session: int) -> None:
        self._check_datastore(target)
        if (holder := self.locks.setdefault(target, session)) != session:
            raise RpcError("lock-denied", f"Lock failed, lock is already held by session {holder}", kind="protocol")

    def unlock(self, target: str, session: int) -> None:
        if self.locks.get(target) != session:
            raise RpcError("operation-failed", f"session {session} holds no lock on {target}", kind="protocol")
        del self.locks[target]
        if target == "candidate":
            self._candidate = None

    def leave(self, session: int) -> None:
        for target in [target for target, holder in self.locks.items() if holder == session]:
            self.unlock(target, session)

    def discard(self) -> None:
        self._check_datastore("candidate")
        self._candidate = None

    async def edit(self, request: Element, session: int, command: str) -> None:
        target = next((local(each) for each in request.iterfind(f"{NC}target/*")), "")
        self._check_datastore(target)
        if target == "running" and self._has_candidate:
            raise RpcError("operation-not-supported", "running cannot be edited: edit candidate and commit")
        self._refuse_locked(target, session)
        default = (request.findtext(f"{NC}default-operation") or "merge").strip()
        wanted = self._candidate if target == "candidate" and self._candidate is not None else self.running()
        before = dict(wanted)
        for config in request.iterfind(f"{NC}config"):
            self._apply(config, default, wanted)
        if target == "candidate":
            self._candidate = wanted
        else:
            await self._carry_out(before, wanted, command)

    async def commit(self, session: int, command: str) -> None:
        self._check_datastore("candidate")
        self._refuse_locked("running", session)
        self._refuse_locked("candidate", session)
        if self._candidate is not None:
            await self._carry_out(self.running(), self._candidate, command)
        self._candidate = None

    async def set_ports(self, request: Element, command: str) -> None:
        """The RPC port-set-state."""
        for leaf, is_enabled in (("port-enab", True), ("port-disab", False)):
            ports = [self._port(each.text, leaf) for each in request.iterfind(NS + leaf)]
            if ports:
                await self._device.enable(ports, is_enabled, command)

    def _check_datastore(self, name: str) -> None:
        if name != "running" and not (name == "candidate" and self._has_candidate):
            raise RpcError("invalid-value", f"there is no datastore {name or 'without a name'}", kind="protocol")

    def _refuse_locked(self, target: str, session: int) -> None:
        if self.locks.get(target, session) != session:
            raise RpcError("in-use", f"{target} is locked by session {self.locks[target]}", kind="protocol")

    def _apply(self, config: Element, default: str, wanted: dict[int, int]) -> None:
        for tree in config:
            if tree.tag != f"{NS}cross-connects":
                raise RpcError("unknown-element", f"{local(tree)} cannot be edited", kind="protocol")
            operation = tree.get(OPERATION, default)
            if operation in ("replace", "delete", "remove"):
                wanted.clear()
            for entry in tree:
                if entry.tag != NS + yang.pair_list(self._revision):
                    raise RpcError("unknown-element", f"unknown element {local(entry)}", f"/{local(tree)}")
                self._apply_pair(entry, entry.get(OPERATION, operation), wanted)

    def _apply_pair(self, entry: Element, operation: str, wanted: dict[int, int]) -> None:
        ingress = self._port(entry.findtext(f"{NS}ingress"), "ingress", self._device.facts.ingress_ports)
        path = f"/cross-connects/{local(entry)}[ingress='{ingress}']"
        if operation in ("delete", "remove"):
            if wanted.pop(ingress, None) is None and operation == "delete":
                raise RpcError("data-missing", "the data to delete is not there", path)
        elif operation in ("merge", "replace", "create"):
            if operation == "create" and ingress in wanted:
                raise RpcError("data-exists", "the data to create is there already", path)
            egress = self._port(entry.findtext(f"{NS}egress"), "egress", self._device.facts.egress_ports)
            facts, pair = self._device.facts, CrossConnect(ingress, egress)
            for other in [
                other for other in wanted.items() if set(facts.ends(pair)) & set(facts.ends(CrossConnect(*other)))
            ]:
                del wanted[other[0]]  # re-routed without a word
            wanted[ingress] = egress
        elif operation != "none":
            raise RpcError("bad-attribute", f"unknown operation {operation}", path, kind="protocol")

    def _port(self, text: str | None, name: str, valid: range | None = None) -> int:
        try:
            port = yang.parse_port((text or "").strip())
        except ValueError as error:
            raise RpcError("invalid-value", str(error), name) from None
        facts = self._device.facts
        if port not in (valid if valid is not None else {*facts.ingress_ports, *facts.egress_ports}):
            raise RpcError("invalid-value", f"there is no {name} port {port}", name)
        return port

    async def _carry_out(self, before: Mapping[int, int], wanted: Mapping[int, int], command: str) -> None:
        new = [CrossConnect(*pair) for pair in wanted.items() if before.get(pair[0]) != pair[1]]
        taken = {end for pair in new for end in self._device.facts.ends(pair)}
        # What is re-routed goes by itself: to remove it as well would be a second command to the glass.
        gone = [CrossConnect(*pair) for pair in before.items() if wanted.get(pair[0]) != pair[1]]
        gone = [pair for pair in gone if taken.isdisjoint(self._device.facts.ends(pair))]
        try:
            if gone:
                await self._device.set(Action.REMOVE, gone, command)
            if new:
                self._listing.commanded(new)
                await self._device.set(Action.ADD, new, command)
        except DriverPermanent as error:
            raise RpcError("operation-failed", error.answer) from None

    def _cross_connects(self, pairs: Mapping[int, int]) -> list[Element]:
        listed = [CrossConnect(*pair) for pair in pairs.items()]
        return trees(cross_connects_container(listed, self._revision), yang.NAMESPACE)

    def _system(self) -> Element:
        tree = Element(f"{NS}system-config")
        if mode := STARTUP.get(self._device.facts.boot):
            leaf = Element(f"{POLATIS_NS}startup-mode")
            leaf.text = mode
            tree.append(leaf)
        return tree
