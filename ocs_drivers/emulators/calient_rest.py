"""The emulator `calient_rest`, which implements the REST interface of a Calient S-series switch for cross-connects and
ports.

Answers have the members that clients of real switches read (see ocs_drivers/calient_rest.py). Failures are reported in
the body of an answer with HTTP status 200.
"""

import json
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

from aiohttp import web

from ocs_drivers.base import DeviceClock
from ocs_drivers.calient_json import PortNames
from ocs_drivers.diff import occupants
from ocs_drivers.emulators.base import DevicePanel, EmulatedDevice, calient_port
from ocs_drivers.emulators.http import EmulatedHttpServer, EmulatedReply, is_let_in
from ocs_drivers.errors import DriverPermanent
from ocs_drivers.faults import DeviceFaultKind
from ocs_drivers.model import Action, CrossConnect, PortState, PortStatus, SwitchFacts
from ocs_drivers.options import CheckedOptions, Flag, Number, YamlText, is_whole, must_be

ROOT = "/rest/"
COOKIE = "JSESSIONID"

Item = Mapping[str, object]


class ItemFailed(Exception):
    """Raised when one item of a request fails. The answer still has HTTP status 200."""


class CalientQuirks(CheckedOptions):
    """Configurable behaviour of an emulated Calient switch. `bulk_s` is the duration of a setter in seconds (according
    to the manual, up to 0.2 s). `conflict_s` is the duration if the switch must first remove circuits (up to 0.5 s).
    `chunked` selects chunked answers. If `user` is set, the first request requires Basic authentication, and later
    requests require a cookie. A cookie is valid for `cookie_uses` requests (0: unlimited). At most `sessions` cookies
    are valid; the oldest cookie expires first."""

    bulk_s: Number = 0.2
    conflict_s: Number = 0.5
    chunked: Flag = False
    cookie_uses: Annotated[int, must_be("a whole number", is_whole)] = 0
    sessions: Annotated[int, must_be("a whole number", is_whole)] = 1
    user: YamlText = ""
    password: YamlText = ""


class CalientRestEmulator(EmulatedHttpServer):
    """An emulated Calient switch, configured by `CalientQuirks`."""

    def __init__(self, panel: DevicePanel, clock: DeviceClock | None = None, **quirks: Any) -> None:
        self._quirks = CalientQuirks.read(quirks, prefix="")
        super().__init__("application/json", chunked=self._quirks.chunked)
        self.device = EmulatedDevice(_facts(panel), panel, clock)
        self._names = PortNames(map(calient_port, self.device.facts.ingress_ports))
        # by value: the device's session, and the number of requests so far
        self._cookies: dict[str, tuple[int, int]] = {}
        self._given = 0
        self._both_ways: set[frozenset[int]] = set()  # pairs made as one two-way connection
        self._groups: dict[str, str] = {}

    async def answer(self, request: web.Request, body: bytes) -> EmulatedReply:
        headers = {}
        if self._quirks.user and not self._is_known(request.cookies.get(COOKIE, "")):
            if not is_let_in(request, self._quirks.user, self._quirks.password):
                return EmulatedReply(401, None, {"WWW-Authenticate": 'Basic realm="Calient"'})
            headers["Set-Cookie"] = f"{COOKIE}={self._new_cookie()}; Path={ROOT}; HttpOnly"
        try:
            reply = await self._dispatch(request, body)
        except ItemFailed as failure:
            reply = EmulatedReply(200, [_result(is_done=False, text=str(failure))])
        return EmulatedReply(reply.status, reply.content, reply.headers | headers)

    def _is_known(self, cookie: str) -> bool:
        session, uses = self._cookies.pop(cookie, (0, 0))
        is_good = uses and self.device.is_alive(session) and not 0 < self._quirks.cookie_uses < uses
        if is_good:
            self._cookies[cookie] = (session, uses + 1)
        return bool(is_good)

    def _new_cookie(self) -> str:
        self._given += 1
        while len(self._cookies) >= self._quirks.sessions:
            del self._cookies[next(iter(self._cookies))]
        cookie = f"{self._given:032X}"
        self._cookies[cookie] = (self.device.session(), 1)
        return cookie

    async def _dispatch(self, request: web.Request, body: bytes) -> EmulatedReply:
        asked: dict[str, object] = dict(request.query)
        content: object = None
        if body:
            is_form = request.content_type == "application/x-www-form-urlencoded" and body.lstrip()[:1] not in b"[{"
            content = dict(await request.post()) if is_form else _json(body)
        if isinstance(content, dict):
            asked = content | asked
        verb = asked.get("id", "delete" if request.method == "DELETE" else "")
        match request.method, request.path.removeprefix(ROOT).rstrip("/"), verb:
            case "GET", "crossconnects", "list":
                return EmulatedReply(200, self._rows())
            case "GET", "ports", "summary" | "detail":
                wanted = asked.get("port")
                rows = self._ports(is_detail=verb == "detail")
                return EmulatedReply(200, [row for row in rows if wanted in (None, row["port"])])
            case "GET", "node", "summary":
                return EmulatedReply(
                    200, {"serialnumber": self.device.facts.serial, "partnumber": self.device.facts.model}
                )
            case "GET", "info", "softwareversion":
                return EmulatedReply(200, {"version": self.device.facts.software})
            case "POST", "crossconnects", "add":
                return EmulatedReply(200, [(await self._add([asked], "add"))[0]["response"]])
            case "POST", "crossconnects", "badd":
                return EmulatedReply(200, await self._add(_items(content), "badd"))
            case "POST", "crossconnects", "bdel":
                return EmulatedReply(200, await self._delete(_items(content), "bdel"))
            case "DELETE", "crossconnects", "delete":
                return EmulatedReply(200, [(await self._delete([asked], "delete"))[0]["response"]])
        return EmulatedReply(404)

    async def _add(self, items: Sequence[Item], verb: str) -> list[dict[str, object]]:
        wanted = [self._pairs(item) for item in items]
        pairs = [pair for of_item in wanted for pair in of_item]
        taken = occupants(self.device.facts, self.device.present)
        in_the_way = {taken[end] for pair in pairs for end in self.device.facts.ends(pair) if end in taken}
        await self.device.clock.sleep(self._quirks.conflict_s if in_the_way - set(pairs) else self._quirks.bulk_s)
        self._count_whole(wanted)
        words = await self._carry_out(self.device.set(Action.ADD, pairs, f"{verb} {' '.join(map(str, pairs))}"))
        answers = []
        for item, of_item in zip(items, wanted, strict=True):
            is_done = not words or (bool(of_item) and self.device.present.issuperset(of_item))
            if len(of_item) == 2 and is_done:
                self._both_ways.add(of_item[0].ports)
            if is_done and of_item:
                self._groups[self._conn(of_item)] = str(item.get("group", "SYSTEM"))
            told = "" if is_done else words
            answers.append({**_echo(item), "response": _result(is_done and bool(of_item), told or "no such port")})
        return answers

    async def _delete(self, items: Sequence[Item], verb: str) -> list[dict[str, object]]:
        connections = {str(row["conn"]): self._halves(str(row["conn"])) for row in self._rows()}
        found = [connections.get(str(item.get("conn")), []) for item in items]
        pairs = [pair for of_item in found for pair in of_item]
        await self.device.clock.sleep(self._quirks.bulk_s)
        self._count_whole(found)
        words = await self._carry_out(self.device.set(Action.REMOVE, pairs, f"{verb} {' '.join(map(str, pairs))}"))
        return [
            {**_echo(item), "response": _result(bool(of_item) and is_done, words if of_item else "no such connection")}
            for item, of_item in zip(items, found, strict=True)
            for is_done in (not words or self.device.present.isdisjoint(of_item),)
        ]

    def _count_whole(self, connections: Sequence[Sequence[CrossConnect]]) -> None:
        """Convert the item count of a pending partial-commit fault from connections to directions, so that a setter
        applied in part always applies both directions of a two-way connection."""
        if partial := self.device.taken(DeviceFaultKind.PARTIAL_COMMIT):
            self.device.inject(replace(partial, items=sum(map(len, connections[: partial.items]))))

    async def _carry_out(self, setter: Awaitable[None]) -> str:
        """Carry out the setter. Return the switch's message if the switch refuses the setter, and "" otherwise."""
        try:
            await setter
        except DriverPermanent as refusal:
            return refusal.answer
        return ""

    def _rows(self) -> list[dict[str, object]]:
        listed = {circuit.cross_connect: circuit.state for circuit in self.device.listed()}
        rows: list[dict[str, object]] = []
        for pair in listed:
            back = pair.turned
            is_both = back in listed and pair.ports in self._both_ways
            if is_both and back < pair:
                continue
            pairs = [pair, back] if is_both else [pair]
            halves = {
                f"half{number}": {
                    "conn": self._conn([half]),
                    "as": "IS",
                    "os": "FAIL" if listed[half] == "failed" else "RDY",
                    "oc": "OK",
                }
                for number, half in enumerate(pairs, start=1)
            }
            conn = self._conn(pairs)
            group = self._groups.get(conn, "SYSTEM")
            rows.append({"name": conn, "conn": conn, "group": group, "dir": "bi" if is_both else "uni", **halves})
        return rows

    def _ports(self, is_detail: bool) -> list[dict[str, object]]:
        listed = [circuit.cross_connect for circuit in self.device.listed()]
        circuit_in = {pair.ingress_port: self._conn([pair]) for pair in listed}
        circuit_out = {pair.egress_port: self._conn([pair]) for pair in listed}
        rows: list[dict[str, object]] = []
        for port in self.device.ports():
            comes, goes = circuit_in.get(port.port, ""), circuit_out.get(port.port, "")
            row = {"port": self._names.name(port.port), "inalias": "", "outalias": ""}
            if is_detail:
                rows.append({**row, **_states(port, comes, goes), "incircuit": comes, "outcircuit": goes})
            else:
                rows.append({**row, "conn": comes or goes, "connid": comes or goes, "power": _dbm(port)})
        return rows

    def _conn(self, pairs: Sequence[CrossConnect]) -> str:
        source, target = self._names.name(pairs[0].ingress_port), self._names.name(pairs[0].egress_port)
        return f"{source}{'-' if len(pairs) == 2 else '>'}{target}"

    def _halves(self, conn: str) -> list[CrossConnect]:
        is_both = "-" in conn
        source, _, target = conn.partition("-" if is_both else ">")
        pair = CrossConnect(self._names.number(source), self._names.number(target))
        return [pair, pair.turned] if is_both else [pair]

    def _pairs(self, item: Item) -> list[CrossConnect]:
        """Return the cross-connects that an item of a request names. The result is empty if a port does not exist.
        Raises ItemFailed for an unknown direction."""
        direction = str(item.get("dir", "bi")).lower()
        if direction not in ("uni", "bi"):
            raise ItemFailed("dir must be uni or bi")
        try:
            return self._halves(f"{item.get('in')}{'-' if direction == 'bi' else '>'}{item.get('out')}")
        except ValueError:
            return []


def _facts(panel: DevicePanel) -> SwitchFacts:
    if panel.ingress_ports != panel.egress_ports:
        raise ValueError(f"a Calient switch must have equal sides, got {panel.ingress_ports}x{panel.egress_ports}")
    return panel.mirrored_facts("Calient", f"S{panel.ingress_ports}", "S-0042", "8.3.1.4")


def _states(port: PortState, comes: str, goes: str) -> dict[str, str]:
    """Return the states that a real switch reports for a port. `comes` and `goes` are the names of the connections at
    the port's ingress and egress, or "" if there is none. For example, a port with an incoming but no outgoing
    connection has `inas` IS and `outas` OOS-NP."""
    is_shut, hardware = port.status is PortStatus.DISABLED, "FAIL" if port.status is PortStatus.FAILED else "OK"
    return {
        "inas": "OOS-MA" if is_shut else "IS" if comes else "OOS-NP",
        "outas": "OOS-MA" if is_shut else "IS" if goes else "OOS-NP",
        "inos": "RDY",
        "outos": "RDY",
        "inoc": hardware,
        "outoc": hardware,
        "inpower": _dbm(port),
        "outpower": _dbm(port),
    }


def _dbm(port: PortState) -> str:
    return "" if port.power_dbm is None else f"{port.power_dbm:.1f}"


def _result(is_done: bool, text: str) -> dict[str, object]:
    return {"status": "1" if is_done else "0", "msg": "OK" if is_done else "FAILED", "description": text}


def _echo(item: Item) -> dict[str, object]:
    return {name: item[name] for name in ("in", "out", "conn") if name in item}


def _items(content: object) -> list[Item]:
    if not isinstance(content, list) or not content or not all(isinstance(item, dict) for item in content):
        raise ItemFailed("must be a list of connections")
    return content


def _json(body: bytes) -> object:
    try:
        value: object = json.loads(body)
    except (ValueError, RecursionError):
        raise ItemFailed("the body is not JSON") from None
    return value
