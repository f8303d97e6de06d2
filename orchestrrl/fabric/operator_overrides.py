"""Store operators' constraints on the fabric: pins, an override and masks. The constraints are journalled, so that they
survive a restart."""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from operator import or_
from typing import Any

from pydantic import TypeAdapter

from orchestrrl.core.clock import Clock
from orchestrrl.core.errors import ProblemFaults
from orchestrrl.core.journal.store import EntryKind, Journal
from orchestrrl.core.ttl import expiry_s, lifetime_faults
from orchestrrl.fabric.periods import FabricControl, OverrideState
from planner.fabric.model import OcsId, PortPair, port_pair, shared_ports
from planner.fabric.plan import FabricFailures
from planner.fabric.topology import ServerId, Site

_CONTROL = TypeAdapter(FabricControl)
_CROSS_CONNECT = re.compile(r"(?P<switch>.+):(?P<one>\d{1,6})-(?P<other>\d{1,6})")
_NUMBERED = re.compile(r"(?P<name>.+):(?P<number>\d{1,6})")
MASKS = "switch SWITCH, port SWITCH:PORT, circuit SWITCH:PORT-PORT, nic SERVER:INDEX or server SERVER"


class OperatorOverrides:
    """The pins, override and masks that operators set for one site. Construction recovers them from the journal."""

    def __init__(self, site: Site, journal: Journal, clock: Clock, changed: Callable[[], None] = lambda: None) -> None:
        """Load the stored constraints. `changed` is called after each change of the constraints."""
        self._site = site
        self._nics = {str(server.id): len(server.tors) for server in site.servers}
        self._journal = journal
        self._clock = clock
        self._control = FabricControl()
        self.masked: tuple[str, ...] = ()
        self._changed = changed
        stored = journal.newest(EntryKind.FABRIC_CONTROL, _constraints_in)
        if stored is not None:
            self._control, masked = stored
            # Drop entries that the current site does not have.
            self.masked = tuple(each for each in masked if not isinstance(self._failure(each), str))
            pins = tuple(each for each in self._control.cross_connects if not self._pin_fault(each))
            if pins != self._control.cross_connects:
                self._control = FabricControl(reason="the pinned cross-connects do not exist in this site")

    @property
    def control(self) -> FabricControl:
        return self._control.at(self._clock.now_s())

    @property
    def pinned(self) -> frozenset[PortPair]:
        return frozenset(map(_cross_connect, self.control.cross_connects))

    @property
    def failures(self) -> FabricFailures:
        found = (self._failure(each) for each in self.masked)
        return reduce(or_, (each for each in found if not isinstance(each, str)), FabricFailures())

    def pin(self, cross_connects: Sequence[str], reason: str, ttl_s: float) -> FabricControl:
        """Pin these cross-connects or, if the list is empty, all cross-connects. Raises ProblemFaults if a
        cross-connect is not possible in the site, two cross-connects use the same port, or `ttl_s` is invalid."""
        faults = [
            f"cross_connects[{index}]: {fault}"
            for index, text in enumerate(cross_connects)
            if (fault := self._pin_fault(text))
        ]
        self._check([*faults, *lifetime_faults(ttl_s)])
        pins = sorted({_cross_connect(text) for text in cross_connects})
        self._check(
            [
                f"cross_connects: port {port} of {switch} must be pinned once, got {count} times"
                for (switch, port), count in shared_ports(pins).items()
            ]
        )
        names = tuple(map(str, pins))
        ends_s = expiry_s(self._clock.now_s(), ttl_s)
        return self._set(FabricControl(OverrideState.PINNED, names, "", reason, ends_s), self.masked, reason)

    def override(self, period: str, reason: str, ttl_s: float, job: str = "") -> FabricControl:
        self._check(lifetime_faults(ttl_s))
        ends_s = expiry_s(self._clock.now_s(), ttl_s)
        control = FabricControl(OverrideState.OVERRIDDEN, (), period, reason, ends_s, job)
        return self._set(control, self.masked, reason)

    def release(self, reason: str) -> FabricControl:
        return self._set(FabricControl(reason=reason), self.masked, reason)

    def mask(self, masked: Sequence[str], reason: str) -> None:
        """Replace the list of masked components, which must not be used. Raises ProblemFaults if a component is not
        part of the site."""
        found = enumerate(map(self._failure, masked))
        self._check([f"masked[{index}]: {fault}" for index, fault in found if isinstance(fault, str)])
        self._set(self._control, tuple(sorted(set(masked))), reason)

    def _set(self, control: FabricControl, masked: tuple[str, ...], reason: str) -> FabricControl:
        """Journal the constraints, then apply them. Raises Permanent if the journal cannot be written."""
        body = {"control": _CONTROL.dump_python(control, mode="json"), "masked": list(masked), "reason": reason}
        self._journal.append(self._clock.now_s(), EntryKind.FABRIC_CONTROL, control.state, body)
        self._control, self.masked = control, masked
        self._changed()
        return control

    @staticmethod
    def _check(faults: list[str]) -> None:
        if faults:
            raise ProblemFaults(faults)

    def _pin_fault(self, text: str) -> str:
        match = _CROSS_CONNECT.fullmatch(text)
        if match is None or match["one"] == match["other"]:
            return f"must be SWITCH:PORT-PORT, got {text!r}"
        ports = self._site.cabling.ports.get(OcsId(match["switch"]))
        if not ports:
            return f"must be on a switch of the site, got {text!r}"
        unknown = sorted({int(match["one"]), int(match["other"])} - ports.keys())
        if unknown:
            return f"must use ports with a fibre ({', '.join(map(str, unknown))} have none), got {text!r}"
        ends = self._site.cabling.ends(_cross_connect(text))
        return "" if ends is not None else f"must join two different endpoints, got {text!r}"

    def _failure(self, text: str) -> FabricFailures | str:
        """Return the component that the mask `text` names, as a FabricFailures value. If `text` is invalid, return a
        description of the fault."""
        kind, _, what = text.partition(" ")
        numbered = _NUMBERED.fullmatch(what)
        name, number = (numbered["name"], int(numbered["number"])) if numbered else ("", 0)
        match kind:
            case "switch" if OcsId(what) in self._site.switch:
                return FabricFailures(switches=frozenset({OcsId(what)}))
            case "port" if OcsId(name) in self._site.switch:
                return FabricFailures(ports=frozenset({(OcsId(name), number)}))
            case "circuit":
                return self._pin_fault(what) or FabricFailures(cross_connects=frozenset({_cross_connect(what)}))
            case "server" if what in self._nics:
                return FabricFailures(servers=frozenset({ServerId(what)}))
            case "nic" if name in self._nics:
                if number >= self._nics[name]:
                    return f"must be a NIC below {self._nics[name]}, the count of its server, got {text!r}"
                return FabricFailures(nics=frozenset({(ServerId(name), number)}))
            case "switch" | "port" | "server" | "nic":
                return f"must name a component of the site, got {text!r}"
        return f"must be {MASKS}, got {text!r}"


def _constraints_in(body: Mapping[str, Any]) -> tuple[FabricControl, tuple[str, ...]]:
    return _CONTROL.validate_python(body["control"]), tuple(map(str, body["masked"]))


def _cross_connect(text: str) -> PortPair:
    match = _CROSS_CONNECT.fullmatch(text)
    assert match is not None, text
    return port_pair(OcsId(match["switch"]), int(match["one"]), int(match["other"]))
