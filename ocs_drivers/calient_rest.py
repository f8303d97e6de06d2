"""The driver `calient_rest`: Calient S-series switches over their REST interface, TCP 80 or 443.

The formats of requests and answers are known from working clients, not from the manual. All paths are below `/rest`.
The first request carries Basic authentication. Its answer contains a cookie, which is sent in later requests instead.
`crossconnects/?id=list` returns rows with `half1` and, for a two-way connection, `half2`. `badd` and `bdel` take lists,
and their answers contain one result per item, `{"response": {"status": "0", ...}}`. Failures are also answered with
HTTP status 200, so they are visible only in the body, where status "1" means success and "0" means failure. According
to the manual, a bulk set may take 200 ms, or 500 ms if the switch resolves conflicts. The mirrors move in about 10 ms.

Ports have names, `SHELF.MODULE.PORT`, and are numbered from 1 in the order of these names. If the switch later lists
other names, or a number of ports that differs from option `ports`, every call fails, because the numbers would refer to
other fibres. With `dir: uni`, a cross-connect is a one-way connection, and a number denotes a port's ingress on one
side and its egress on the other. With `dir: bi`, a cross-connect is a two-way connection, and the switch is treated as
any-to-any. A connection that another client made in one direction only is then reported as failed.

It is not known whether `ports/?id=detail` covers all ports at once. `port_source: summary` avoids this request, but
then no port is reported as failed. The full set of values of the states `as`, `os` and `oc` is not known. States that
contain FAIL, FLT or FAULT are treated as failed. OOS states other than OOS-NP are treated as disabled. The answer to an
expired cookie is assumed to be 401. The driver never uses `deleteall`.
"""

from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from functools import partial
from typing import Annotated, TypeVar

from ocs_drivers import calient_json as parse
from ocs_drivers.base import DeviceClock, SwitchWire
from ocs_drivers.errors import DriverPermanent
from ocs_drivers.http_session import HttpOptions, HttpSession, Scheme, read_answer
from ocs_drivers.model import (
    Action,
    CircuitState,
    Connectivity,
    CrossConnect,
    DeviceCircuit,
    PortState,
    SwitchCapabilities,
    SwitchFacts,
)
from ocs_drivers.options import ConfiguredSwitch, SecondsOr0, Text, whole
from ocs_drivers.settling import Settling

T = TypeVar("T")

DEFAULT_PORTS = {Scheme.HTTP: 80, Scheme.HTTPS: 443}
RECONFIGURATION_S = 0.010  # 3D MEMS (Calient), the paper's table 2
ROOT = "/rest/"
MEDIA_TYPE = "application/json"


class CrossConnectDirection(StrEnum):
    UNI = "uni"
    BI = "bi"


class PortSource(StrEnum):
    DETAIL = "detail"
    SUMMARY = "summary"


class CalientOptions(HttpOptions):
    default_ports = DEFAULT_PORTS
    requests = 4

    dir: CrossConnectDirection = CrossConnectDirection.UNI
    group: Text = "SYSTEM"
    port_source: PortSource = PortSource.DETAIL
    ports: Annotated[int, whole(2)] | None = None
    reconfiguration_s: SecondsOr0 = RECONFIGURATION_S


class CalientRestWire(SwitchWire):
    """Implements the operations of `base.SwitchWire` as HTTP requests."""

    def __init__(self, options: CalientOptions, clock: DeviceClock, session: HttpSession | None = None) -> None:
        self.capabilities = SwitchCapabilities(bulk=True, port_power=options.port_source is PortSource.DETAIL)
        self._options = options
        self._session = session or HttpSession(options, clock, cookies=True)
        self._settling = Settling(clock, options.reconfiguration_s)
        self._names: parse.PortNames | None = None
        self._listed: dict[CrossConnect, parse.CalientConnection] = {}  # from the last reading

    async def open(self) -> None:
        await self._session.open()
        self._accept_port_names(await self._get("ports/", {"id": "summary"}, parse.ports))

    async def close(self) -> None:
        await self._session.close()

    async def read_facts(self) -> SwitchFacts:
        config = {"id": "summary", "detail": "SYSCFG"}
        numbers = range(1, len(self._port_names.names) + 1)
        is_bi = self._options.dir is CrossConnectDirection.BI
        return SwitchFacts(
            vendor="Calient",
            model=await self._get("node/", config, lambda body: parse.text(body, "partnumber")) or "unknown",
            serial=await self._get("node/", config, lambda body: parse.text(body, "serialnumber")),
            software=await self._get("info/", {"id": "softwareversion"}, lambda body: parse.text(body, "version")),
            connectivity=Connectivity.ANY_TO_ANY if is_bi else Connectivity.INGRESS_EGRESS,
            ingress_ports=numbers,
            egress_ports=numbers,
            reconfiguration_s=self._options.reconfiguration_s,
        )

    async def read_ports(self) -> Sequence[PortState]:
        told = await self._get("ports/", {"id": self._options.port_source.value}, parse.ports)
        known, has_power = self._accept_port_names(told), self.capabilities.port_power
        return [
            PortState(known.number(name), status, power_dbm if has_power else None)
            for name, (status, power_dbm) in told.items()
        ]

    async def read_circuits(self) -> Sequence[DeviceCircuit]:
        moving = self._settling.moving()
        rows = await self._get("crossconnects/", {"id": "list"}, parse.connections)
        self._listed = {}
        broken = set()
        for row in rows:
            for half in row.halves:
                try:
                    pair = self._pair(half)
                except ValueError as error:
                    raise DriverPermanent(f"the ports of connection {row.conn} cannot be numbered: {error}") from None
                self._listed[pair] = row
                if half.is_broken:
                    broken.add(pair)
        shown = set(self._listed)
        if self._options.dir is CrossConnectDirection.BI:
            broken |= {pair for pair in shown if pair.turned not in shown}
            broken |= {pair.turned for pair in broken}
            shown = {min(pair, pair.turned) for pair in shown}
        return [
            DeviceCircuit(circuit.cross_connect, CircuitState.FAILED) if circuit.cross_connect in broken else circuit
            for circuit in self._settling.circuits(sorted(shown), moving)
        ]

    async def set(self, action: Action, pairs: Sequence[CrossConnect]) -> None:
        with self._settling.commanding(action, pairs):
            await (self._add if action is Action.ADD else self._remove)(pairs)

    async def _add(self, pairs: Sequence[CrossConnect]) -> None:
        known = self._port_names
        group = {"group": self._options.group} if self._options.group else {}
        items = [
            {"in": known.name(pair.ingress_port), "out": known.name(pair.egress_port), "dir": self._options.dir.value}
            | group
            for pair in pairs
        ]
        await self._set("badd", items, [f"{item['in']}>{item['out']}" for item in items])

    async def _remove(self, pairs: Sequence[CrossConnect]) -> None:
        going = frozenset(pairs) | (
            frozenset(pair.turned for pair in pairs) if self._options.dir is CrossConnectDirection.BI else frozenset()
        )
        items: dict[str, dict[str, str]] = {}
        for pair in going:
            row = self._listed.get(pair)
            if row is None:
                continue  # absent in the last reading, or the other direction, which is in the same row
            for half in row.halves:
                if (other := self._pair(half)) not in going:
                    raise DriverPermanent(
                        f"cross-connect {pair} is one direction of connection {row.conn}, which can only be removed as "
                        f"a whole: remove cross-connect {other} too"
                    )
            items[row.conn] = {"conn": row.conn} | ({"group": row.group} if row.group else {})
        if not items:
            return
        await self._set("bdel", [items[conn] for conn in sorted(items)], sorted(items))

    def _pair(self, half: parse.CalientHalf) -> CrossConnect:
        return CrossConnect(self._port_names.number(half.source), self._port_names.number(half.target))

    @property
    def _port_names(self) -> parse.PortNames:
        if self._names is None:
            raise DriverPermanent("the ports of the switch have not been read yet")
        return self._names

    def _accept_port_names(self, names: Iterable[str]) -> parse.PortNames:
        """Return the port names that the switch lists now. Raises DriverPermanent if they differ from the names that
        the switch listed first, or if their number differs from option `ports`."""
        listed = parse.PortNames(names)
        if self._options.ports not in (None, len(listed.names)):
            raise DriverPermanent(
                f"the switch has {len(listed.names)} ports, but the option `ports` is {self._options.ports}"
            )
        if self._names is None:
            self._names = listed
        if changed := sorted({*listed.names} ^ {*self._names.names}):
            raise DriverPermanent(
                f"the switch lists different ports than before ({len(changed)} differ, the first is {changed[0]}), so "
                "port numbers would refer to different fibres: check the switch, then restart the daemon"
            )
        return self._names

    async def _get(self, path: str, query: dict[str, str], parse_body: Callable[[object], T]) -> T:
        answer = await self._session.request("GET", ROOT + path, query=query, headers={"Accept": MEDIA_TYPE})
        return read_answer(answer, f"GET {ROOT}{path}?id={query['id']}", parse_body)

    async def _set(self, verb: str, items: Sequence[dict[str, str]], shown: Sequence[str]) -> None:
        """Send the bulk request `verb` (badd or bdel) with these items. Raises DriverPermanent if any item failed, with
        the device's message for each failed item. `shown` contains the name of each item in the message."""
        command = f"POST {ROOT}crossconnects/?id={verb}"
        answer = await self._session.request(
            "POST",
            f"{ROOT}crossconnects/",
            query={"id": verb},
            content=list(items),
            headers={"Accept": MEDIA_TYPE, "Content-Type": MEDIA_TYPE},
            is_setter=True,
        )
        results = read_answer(answer, command, partial(parse.failures, count=len(items)), is_setter=True)
        if failed := [f"{name}: {why}" for name, why in zip(shown, results, strict=True) if why]:
            raise DriverPermanent(
                f"the request failed for {len(failed)} of {len(items)} connections",
                command=command,
                answer="; ".join(failed[:20]),
            )


class CalientRestSwitch(ConfiguredSwitch, options=CalientOptions, wire=CalientRestWire):
    """The driver of a Calient switch at `address`, HOST or HOST:PORT.

    `scheme` is http or https. `tls_ca_file` (PEM) replaces the system's certificate authorities. `user` and `password`
    are the login. `dir` is uni or bi, and `port_source` is detail or summary; the module's docstring explains both.
    `group` is the group of new connections. `ports` is the required number of ports.
    """
