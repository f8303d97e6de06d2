"""The flags of `orchestrrl gateway` as its options; every fault at once."""

from collections.abc import Sequence
from pathlib import Path

from orchestrrl.core.addresses import check_url, parse_address, remote_fault, same_address
from orchestrrl.core.errors import Permanent, ProblemFaults
from orchestrrl.core.operations import EngineRoute
from orchestrrl.engines.base import connect
from orchestrrl.gateway.ledger.file import check
from orchestrrl.gateway.ledger.store import BATCH_S, RetentionPolicy
from orchestrrl.gateway.ledger.versions import OnStale
from orchestrrl.gateway.relay import RelayLimits
from orchestrrl.gateway.routing.strategies import STRATEGIES, AffinitySlack, RoutingPolicy
from orchestrrl.gateway.service import GatewayOptions
from planner.model import EngineId, NodeId

MOST_PORT = 65535


def read_options(
    *,
    listen: str,
    engines: list[str],
    daemon: str | None,
    policy: str,
    engine_kind: str,
    gateway_id: str,
    engine_wait_s: float,
    stall_s: float,
    report_interval_s: float,
    drain_s: float,
    coalesce_tokens: int,
    processes: int,
    log_level: str,
    affinity: Sequence[str] = (),
    pools: Sequence[str] = (),
    affinity_slack: int = AffinitySlack().requests,
    queue_depth: int = 0,
    plain_http: bool = False,
    max_version_lag: int = -1,
    on_stale: str = OnStale.ABORT,
    ledger: Path | None = None,
    keep_from_s: float = BATCH_S,
    keep_answers_s: float = 3600.0,
    keep_answers_mb: float = 1024.0,
    operator: str = "127.0.0.1:0",
    allow_remote: bool = False,
) -> GatewayOptions:
    """Raises ProblemFaults that names every bad flag."""
    faults: list[str] = []
    host, port = _address("listen", listen, allow_remote, faults)
    operator_host, operator_port = _address("operator", operator, allow_remote, faults)
    if operator_port and operator_port + processes - 1 > MOST_PORT:
        faults.append(f"--operator: must leave ports for --processes {processes}, got {operator!r}")
    routes = _routes(engines, faults)
    tags = _pairs("affinity", "TAG=POOL", affinity, faults)
    pool_of = _pairs("pool", "ENGINE=POOL", pools, faults)
    strangers = pool_of.keys() - {route.engine for route in routes}
    faults += [f"--pool: {name!r} is no --engine" for name in sorted(strangers)]
    if not engines and daemon is None:
        faults.append("--engine: is missing, and there is no --daemon to name engines either")
    if daemon is not None and not daemon.startswith("unix:") and not daemon.rpartition(":")[2].isdecimal():
        faults.append(f"--daemon: must be HOST:PORT or unix:PATH, got {daemon!r}")
    if policy not in STRATEGIES:
        faults.append(f"--policy: must be one of {', '.join(STRATEGIES)}, got {policy!r}")
    durations = {"engine-wait-s": engine_wait_s, "stall-s": stall_s, "report-interval-s": report_interval_s}
    faults += [f"--{name}: must be > 0, got {value:g}" for name, value in durations.items() if not value > 0]
    if not drain_s >= 0:
        faults.append(f"--drain-s: must be >= 0, got {drain_s:g}")
    numbers = {"affinity-slack": affinity_slack, "queue-depth": queue_depth}
    faults += [f"--{name}: must be >= 0, got {value}" for name, value in numbers.items() if value < 0]
    counts = {"coalesce-tokens": coalesce_tokens, "processes": processes}
    faults += [f"--{name}: must be >= 1, got {value}" for name, value in counts.items() if value < 1]
    if max_version_lag < -1:
        faults.append(f"--max-version-lag: must be >= 0, or -1 for none, got {max_version_lag}")
    if on_stale not in list(OnStale):
        faults.append(f"--on-stale: must be one of {', '.join(OnStale)}, got {on_stale!r}")
    if log_level not in ("debug", "info", "warning", "error"):
        faults.append(f"--log-level: must be one of debug, info, warning, error, got {log_level!r}")
    try:
        connect(engine_kind, "http://127.0.0.1:1")
    except Permanent as error:
        faults.append(f"--engine-kind: {error}")
    keep = _keep(ledger, keep_from_s, keep_answers_s, keep_answers_mb, faults)
    if faults:
        raise ProblemFaults(faults)
    return GatewayOptions(
        host=host,
        port=port,
        operator_host=operator_host,
        operator_port=operator_port,
        node=NodeId(gateway_id),
        engines=tuple(routes),
        engine_kind=engine_kind,
        daemon=daemon,
        routing=RoutingPolicy(policy, tags, AffinitySlack(affinity_slack)),
        queue_depth=queue_depth,
        pools={EngineId(name): value for name, value in pool_of.items()},
        limits=RelayLimits(
            engine_wait_s=engine_wait_s,
            stall_s=stall_s,
            coalesce_tokens=coalesce_tokens,
            max_version_lag=None if max_version_lag < 0 else max_version_lag,
            on_stale=OnStale(on_stale),
        ),
        report_interval_s=report_interval_s,
        drain_s=drain_s,
        processes=processes,
        log_level=log_level,
        plain_http=plain_http,
        keep=keep,
    )


def _keep(
    ledger: Path | None, keep_from_s: float, keep_answers_s: float, keep_answers_mb: float, faults: list[str]
) -> RetentionPolicy | None:
    before = len(faults)
    if not keep_from_s >= 0:
        faults.append(f"--keep-from-s: must be >= 0, got {keep_from_s:g}")
    if not keep_answers_s > 0:
        faults.append(f"--keep-answers-s: must be > 0, got {keep_answers_s:g}")
    if not 1 <= keep_answers_mb < 1 << 40:
        faults.append(f"--keep-answers-mb: must be >= 1, got {keep_answers_mb:g}")
    if ledger is None or len(faults) > before:
        return None
    try:
        check(ledger)
    except Permanent as error:
        faults.append(f"--ledger: {error}")
        return None
    return RetentionPolicy(ledger, keep_from_s, keep_answers_s, int(keep_answers_mb * (1 << 20)))


def _address(flag: str, address: str, allow_remote: bool, faults: list[str]) -> tuple[str, int]:
    try:
        host, port = parse_address(address)
    except ValueError as error:
        faults.append(f"--{flag}: {error}, got {address!r}")
        return "", 0
    if not allow_remote and (fault := remote_fault(host, "add --allow-remote")):
        faults.append(f"--{flag}: {fault}, got {address!r}")
    return host, port


def _pairs(flag: str, form: str, items: Sequence[str], faults: list[str]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for item in items:
        name, _, value = item.partition("=")
        if not name or not value:
            faults.append(f"--{flag}: must be {form}, got {item!r}")
        elif name in pairs:
            faults.append(f"--{flag}: {name!r} is given twice")
        else:
            pairs[name] = value
    return pairs


def _routes(engines: list[str], faults: list[str]) -> list[EngineRoute]:
    routes: list[EngineRoute] = []
    for item in engines:
        name, separator, url = item.partition("=")
        wrong = "" if name and separator else "must be ID=URL with an http URL"
        try:
            check_url(url)
        except ValueError as error:
            wrong = wrong or f"URL {error}"
        if wrong:
            faults.append(f"--engine: {wrong}, got {item!r}")
        elif any(route.engine == name for route in routes):
            faults.append(f"--engine: {name!r} is given twice")
        elif twin := next((route.engine for route in routes if same_address(route.url, url)), None):
            faults.append(f"--engine: must have another URL than {twin!r}, got {item!r}")
        else:
            routes.append(EngineRoute(EngineId(name), url.rstrip("/")))
    return routes
