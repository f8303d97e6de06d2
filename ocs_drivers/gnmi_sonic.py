"""Read and change the tables of SONiC-OCS over gNMI. The functions for names and parsing have no side effects.
`SonicWire` communicates with the device.

The sources are the OCS design of sonic-net/SONiC (doc/ocs/ocs_hld.md) and the image `ocs-kvm` of
sonic-ocs/sonic-buildimage, which differ. CONFIG_DB, where circuits are configured, has `OCS_PORT[1A]{label,state}`
(image: `config_status`), with state `normal|force_blocked` (image: also `powered_off`), and
`OCS_CROSS_CONNECT[1A-2B]{a_side,b_side}`. STATE_DB, which reports the effect, has `OCS_PORT{status}` with
`blocked|tuning|tuned|failed`, and `OCS_CROSS_CONNECT{a_side_status,b_side_status}`. In the image, the names of these
tables end in `_TABLE`, ports have `oper_status` (`connected` for tuned) and each circuit has a `status`. The driver
reads both forms. With N ports on the A side, the circuit from port 1 of the A side to port 2 of the B side is the
cross-connect 1:(N+2), because port 2 of each side has its own state.

The driver assumes that deleting and updating keys of OCS_CROSS_CONNECT in one SetRequest is one transaction of the
database. The transaction does not include the mirrors, so the hardware may apply part of it, and rejected circuits may
stay in CONFIG_DB. The driver reports the ports of such a circuit as in use, but the circuit as not tuned. It is not
known whether circuits in CONFIG_DB survive a restart. Presumably, they survive only if the configuration is saved.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ocs_drivers.errors import DriverPermanent
from ocs_drivers.gnmi_data import Path, mapping, member, path
from ocs_drivers.gnmi_session import GnmiWire
from ocs_drivers.model import (
    Action,
    CircuitState,
    Connectivity,
    CrossConnect,
    DeviceCircuit,
    PortState,
    PortStatus,
    SwitchFacts,
)

CONFIG, STATE, HOST = "CONFIG_DB", "STATE_DB", "localhost"
PORTS, CROSS_CONNECTS, METADATA = "OCS_PORT", "OCS_CROSS_CONNECT", "DEVICE_METADATA"
# The server calls its origin `sonic-db` and lists it among its models. Other sources call it `sonic_db`.
ORIGINS = ("sonic-db", "sonic_db")
SUFFIXES = ("", "_TABLE")

_PORT = re.compile(r"([1-9][0-9]{0,4})([AB])")
_CROSS_CONNECT = re.compile(r"([1-9][0-9]{0,4}A)-([1-9][0-9]{0,4}B)")

# The states of a side, and of a circuit of the image. `blocked` is a mirror that is not in place, temporarily or
# permanently.
_STATES = {
    "tuned": CircuitState.TUNED,
    "connected": CircuitState.TUNED,
    "enabled": CircuitState.TUNED,
    "failed": CircuitState.FAILED,
    "invalid": CircuitState.FAILED,
}


@dataclass(frozen=True, slots=True)
class SonicPorts:
    """The number of simplex ports on each side. The N ports of the A side are named `1A`..`NA` and numbered 1..N. The M
    ports of the B side are named `1B`..`MB` and numbered N+1..N+M."""

    a_ports: int
    b_ports: int

    def port(self, name: str) -> int:
        """Return the number of the port with this name. Raises ValueError if this device has no such port."""
        found = _PORT.fullmatch(name)
        if found is None or int(found[1]) > (self.a_ports if found[2] == "A" else self.b_ports):
            raise ValueError(f"a port must be within 1A..{self.a_ports}A or 1B..{self.b_ports}B, got {name!r}")
        return int(found[1]) if found[2] == "A" else self.a_ports + int(found[1])

    def name(self, port: int) -> str:
        if not 1 <= port <= self.a_ports + self.b_ports:
            raise ValueError(f"port must be within 1..{self.a_ports + self.b_ports}, got {port}")
        return f"{port}A" if port <= self.a_ports else f"{port - self.a_ports}B"

    def key(self, pair: CrossConnect) -> str:
        """Return the key of a cross-connect in OCS_CROSS_CONNECT, such as `1A-2B`. Raises ValueError unless the ingress
        port is on the A side and the egress port on the B side."""
        if not 1 <= pair.ingress_port <= self.a_ports < pair.egress_port <= self.a_ports + self.b_ports:
            raise ValueError(f"cross-connect {pair} must go from a port of the A side to a port of the B side")
        return f"{self.name(pair.ingress_port)}-{self.name(pair.egress_port)}"

    def cross_connect(self, key: str) -> CrossConnect:
        found = _CROSS_CONNECT.fullmatch(key)
        if found is None:
            raise ValueError(f"a cross-connect must have the form 1A-2B, got {key!r}")
        return CrossConnect(self.port(found[1]), self.port(found[2]))


def sides_of(names: Iterable[str]) -> SonicPorts:
    """Return the number of ports on each side, given the names of all ports. Raises ValueError if a name is malformed,
    a side has no ports, or the ports of a side are not numbered from 1 without gaps."""
    listed = set(names)
    strange = sorted(name for name in listed if not _PORT.fullmatch(name))
    sides = SonicPorts(sum(name.endswith("A") for name in listed), sum(name.endswith("B") for name in listed))
    if strange or not sides.a_ports or not sides.b_ports:
        raise ValueError(
            f"ports must be named 1A, 2A, ... and 1B, 2B, ..., got {', '.join(strange[:5]) or 'one side only'}"
        )
    for name in sorted(listed):
        sides.port(name)
    return sides


def circuits(sides: SonicPorts, ordered: Mapping[str, Any], shown: Mapping[str, Any]) -> list[DeviceCircuit]:
    """Return the circuits that are in the table of configured cross-connects (`ordered`), in the table of
    cross-connects in effect (`shown`), or in both. Both tables are mappings from keys to rows."""
    found = []
    for key in sorted({*ordered, *shown}):
        entry, state = mapping(ordered.get(key)), mapping(shown.get(key))
        said = {side: entry.get(side) or state.get(side) for side in ("a_side", "b_side")}
        if any(name and name not in key.split("-") for name in said.values()):
            raise ValueError(f"a_side and b_side of cross-connect {key} must be the ports in its name, got {said}")
        found.append(DeviceCircuit(sides.cross_connect(key), _state(state)))
    return found


def port_states(sides: SonicPorts, ordered: Mapping[str, Any], shown: Mapping[str, Any]) -> list[PortState]:
    return [
        PortState(sides.port(name), _port_status(mapping(ordered[name]), mapping(shown.get(name)))) for name in ordered
    ]


def _state(entry: Mapping[str, Any]) -> CircuitState:
    sides = [str(entry[name]).lower() for name in ("a_side_status", "b_side_status") if entry.get(name)]
    states = {_STATES.get(word, CircuitState.TUNING) for word in sides or [str(entry.get("status", "")).lower()]}
    if CircuitState.FAILED in states:
        return CircuitState.FAILED
    return CircuitState.TUNED if states == {CircuitState.TUNED} else CircuitState.TUNING


def _port_status(ordered: Mapping[str, Any], shown: Mapping[str, Any]) -> PortStatus:
    if str(shown.get("status") or shown.get("oper_status") or "").lower() == "failed":
        return PortStatus.FAILED
    override = str(ordered.get("state") or ordered.get("config_status") or "normal").lower()
    return PortStatus.ENABLED if override == "normal" else PortStatus.DISABLED


class SonicWire(GnmiWire):
    """Implements the operations of `base.SwitchWire` for the model `sonic`."""

    async def attach(self, models: Mapping[str, str]) -> None:
        if not self._options.origin:
            self._origin = next((origin for origin in ORIGINS if origin in models), ORIGINS[0])
        self._software = models.get(self._origin, "")
        self._suffix: str | None = None  # of the tables in STATE_DB, once known
        listed = await self._table(CONFIG, PORTS)
        if not listed:
            raise DriverPermanent(
                f"table {PORTS} of {CONFIG} contains no ports: check the option `origin`, which is now {self._origin!r}"
            )
        self._sides = sides_of(listed)

    async def read_facts(self) -> SwitchFacts:
        sides = self._sides
        device = mapping(member(await self._table(CONFIG, METADATA), HOST))
        return SwitchFacts(
            vendor="SONiC",
            model=str(device.get("hwsku") or device.get("platform") or "unknown"),
            serial=str(device.get("chassis_serial_number") or ""),
            software=self._software,
            connectivity=Connectivity.INGRESS_EGRESS,
            ingress_ports=range(1, sides.a_ports + 1),
            egress_ports=range(sides.a_ports + 1, sides.a_ports + sides.b_ports + 1),
            reconfiguration_s=self._options.reconfiguration_s,
        )

    async def read_ports(self) -> Sequence[PortState]:
        ordered = await self._table(CONFIG, PORTS)
        return port_states(self._sides, ordered, await self._shown(PORTS))

    async def read_circuits(self) -> Sequence[DeviceCircuit]:
        # Read in this order: a row that leaves the first table in between is still in the second.
        ordered = await self._table(CONFIG, CROSS_CONNECTS)
        return circuits(self._sides, ordered, await self._shown(CROSS_CONNECTS))

    async def set(self, action: Action, pairs: Sequence[CrossConnect]) -> None:
        sides = self._sides
        if action is Action.REMOVE:
            await self.transact(delete=[cross_connect_path(sides.key(pair)) for pair in pairs])
            return
        update = []
        for pair in pairs:
            entry = {"a_side": sides.name(pair.ingress_port), "b_side": sides.name(pair.egress_port)}
            update.append((cross_connect_path(sides.key(pair)), entry))
        await self.transact(update=update)

    def watched(self) -> Sequence[Path]:
        suffix = self._suffix or ""  # known by now, if the tables exist
        tables = [path(STATE, HOST, table + suffix) for table in (CROSS_CONNECTS, PORTS)]
        return [*tables, path(CONFIG, HOST, PORTS)]

    async def _shown(self, table: str) -> Mapping[str, Any]:
        """Return the rows of a table of STATE_DB by key. The table's name may have the suffix `_TABLE`. The result is
        empty if the table does not exist yet."""
        for suffix in SUFFIXES if self._suffix is None else (self._suffix,):
            rows = await self._table(STATE, table + suffix)
            if rows:
                self._suffix = suffix
                return rows
        return {}

    async def _table(self, database: str, table: str) -> Mapping[str, Any]:
        """Return all rows of a table by key. The result is empty if the table does not exist, because the database has
        no tables without rows."""
        return await self.tree(path(database, HOST, table))


def cross_connect_path(key: str) -> Path:
    """Return the path of one row of OCS_CROSS_CONNECT. The path never denotes the whole table. Raises ValueError if the
    key is malformed."""
    if not _CROSS_CONNECT.fullmatch(key):
        raise ValueError(f"a cross-connect must have the form 1A-2B, got {key!r}")
    return path(CONFIG, HOST, CROSS_CONNECTS, key)
