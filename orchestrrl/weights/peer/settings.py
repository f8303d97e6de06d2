"""Settings of a peer, parsed from its command-line options. All faults are reported at once.

This module uses neither typer nor YAML, because a trainer's environment may lack them.
"""

import contextlib
import ipaddress
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from orchestrrl.core.addresses import parse_address, remote_fault
from orchestrrl.core.engine_arguments import parse_engines
from orchestrrl.core.errors import Permanent, ProblemFaults
from orchestrrl.engines.base import ENGINES
from orchestrrl.weights.model import LOOPBACK, Peer, PeerLocation, PeerRole, host_name
from orchestrrl.weights.peer.arguments import FOLDERS, PREFERRED, PeerArguments
from orchestrrl.weights.transports.base import TRANSPORTS
from planner.model import EngineId, PeerId
from planner.sync_tree.shares import EngineShare

_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class PeerSettings:
    peer: Peer  # its description for the daemon, without transports, engines and versions
    daemon: str
    address: str  # of this host, for other peers
    engines: Mapping[EngineId, str]  # URL of each engine
    product: str
    transports: tuple[str, ...]
    poll_engines_s: float


def settings_of(arguments: PeerArguments) -> PeerSettings:
    """Validate the options and return the settings. Raises ProblemFaults with all faults if options are invalid."""
    faults: list[str] = []
    engines = _engines(arguments, faults)
    share = _made(lambda: _share(arguments), faults)
    if not arguments.id or not arguments.id.isprintable() or "/" in arguments.id or arguments.id in (".", ".."):
        faults.append(f"--id: must be a name without /, got {arguments.id!r}")
    if not arguments.daemon.startswith("unix:"):
        _made(lambda: parse_address(arguments.daemon), faults, "--daemon", arguments.daemon)
    for name in arguments.transports:
        if name not in TRANSPORTS:
            faults.append(f"--transport: must be one of {', '.join(TRANSPORTS.names())}, got {name!r}")
    if arguments.gpu is not None and (arguments.pod or arguments.tor):
        faults.append(f"--site-gpu: determines the location, so remove --pod and --tor, got {arguments.gpu}")
    if arguments.gpu is not None and arguments.gpu < 0:
        faults.append(f"--site-gpu: must be >= 0, got {arguments.gpu}")
    if arguments.tor and not arguments.pod:
        faults.append(f"--tor: needs --pod, got {arguments.tor!r}")
    if not arguments.nic_gbps >= 0 or arguments.nic_gbps == float("inf"):
        faults.append(f"--nic-gbps: must be >= 0, got {arguments.nic_gbps:g}")
    if not 0 < arguments.poll_engines_s < float("inf"):
        faults.append(f"--poll-engines-s: must be > 0, got {arguments.poll_engines_s:g}")
    if arguments.folder and not Path(arguments.folder).is_absolute():
        faults.append(f"--folder: must be an absolute path, engines and trainers use it, got {arguments.folder!r}")
    address = _made(lambda: _address(arguments), faults)
    if address is not None and not arguments.allow_remote and (fault := remote_fault(address, "add --allow-remote")):
        faults.append(f"--host: {fault}, got {address!r}")
    for place, name in enumerate(arguments.ranks_of):
        if not name or name in engines:
            what = "must name an engine" if not name else "must not be an engine of this peer (--engine)"
            faults.append(f"--ranks-of[{place}]: {what}, got {name!r}")
    if faults or share is None or address is None:
        raise ProblemFaults(faults)
    serves = _names_here(arguments, address) if arguments.engines_here else ()
    peer = Peer(
        PeerId(arguments.id),
        PeerRole.ENGINE if engines or serves or arguments.ranks_of else PeerRole.TRAINER,
        socket.gethostname(),
        PeerLocation(arguments.gpu, arguments.pod, arguments.tor, arguments.nic_gbps),
        transports={},
        share=share,
        folder=arguments.folder or f"{FOLDERS}{arguments.id}",
        serves=serves,
        ranks_of=tuple(dict.fromkeys(map(EngineId, arguments.ranks_of))),
    )
    transports = tuple(dict.fromkeys(arguments.transports)) or PREFERRED
    return PeerSettings(
        peer, arguments.daemon, address, engines, arguments.product, transports, arguments.poll_engines_s
    )


def _names_here(arguments: PeerArguments, address: str) -> tuple[str, ...]:
    """Return the names by which other hosts address this host. Loopback is included if the daemon runs on this host,
    because the daemon then reports local engines with loopback URLs."""
    name = socket.gethostname()
    names = [address, name]
    with contextlib.suppress(OSError):  # the name cannot be resolved
        names += [str(told[4][0]) for told in socket.getaddrinfo(name, None)]
    # A name that resolves to loopback does not imply that the daemon is on this host.
    own = [each for each in names if host_name(each) != LOOPBACK]
    return tuple(dict.fromkeys([*own, *([LOOPBACK] if _is_beside_daemon(arguments.daemon) else [])]))


def _is_beside_daemon(daemon: str) -> bool:
    """Return whether the daemon runs on this host."""
    if daemon.startswith("unix:"):
        return True
    try:
        host, port = parse_address(daemon)
        return len({str(ipaddress.ip_address(each)) for each in _way_to(host, port)}) == 1
    except (OSError, ValueError):
        return False


def _way_to(host: str, port: int) -> tuple[str, str]:
    """Return the local and the remote IP address of a connection to a host."""
    family, kind, _, _, place = socket.getaddrinfo(host, port or 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(place)  # sends nothing
        return str(probe.getsockname()[0]), str(place[0])


def _engines(arguments: PeerArguments, faults: list[str]) -> dict[EngineId, str]:
    found = parse_engines(arguments.engines, faults)
    try:
        if arguments.engines or arguments.engines_here:
            ENGINES.load(arguments.product)
        else:  # a trainer's host needs no engine client, nor the packages that it imports
            ENGINES.check(arguments.product)
    except Permanent as error:
        faults.append(f"--engine-kind: {error}")
    return found


def _share(arguments: PeerArguments) -> EngineShare:
    ranks = {name: tuple(getattr(arguments, f"{name}_ranks")) for name in ("tp", "pp", "ep")}
    for name, chosen in ranks.items():
        if not chosen:
            ranks[name] = tuple(range(max(1, min(getattr(arguments, name), 65536))))
        if len(set(chosen)) < len(chosen):
            raise ValueError(f"--{name}-rank: must not repeat a rank, got {list(chosen)}")
    try:
        return EngineShare(arguments.tp, ranks["tp"], arguments.pp, ranks["pp"], arguments.ep, ranks["ep"])
    except ValueError as error:
        raise ValueError(f"--tp, --pp, --ep: {error}") from error


def _address(arguments: PeerArguments) -> str:
    """Return the address from --host or, if --host is not given, the local address of the route to the daemon. Raises
    ValueError if --host is unusable or no route is found."""
    if arguments.host:
        if arguments.host in ("0.0.0.0", "::"):
            raise ValueError(f"--host: must be an address that other peers can reach, got {arguments.host!r}")
        try:
            socket.getaddrinfo(arguments.host, None)
        except OSError as error:
            raise ValueError(
                f"--host: must be a name or address that can be resolved ({error}), got {arguments.host!r}"
            ) from error
        return arguments.host
    if arguments.daemon.startswith("unix:"):
        return "127.0.0.1"
    try:
        host, port = parse_address(arguments.daemon)
        return str(ipaddress.ip_address(_way_to(host, port)[0]))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--host: must be set, because no route to --daemon {arguments.daemon} was found ({error}), got ''"
        ) from error


def _made(make: Callable[[], _Value], faults: list[str], option: str = "", value: str = "") -> _Value | None:
    try:
        return make()
    except ValueError as error:
        faults.append(f"{option}: {error}, got {value!r}" if option else str(error))
        return None
