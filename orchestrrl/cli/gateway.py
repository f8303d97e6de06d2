"""`orchestrrl gateway`: serve OpenAI's endpoints in front of the engines."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from orchestrrl.addresses import check_url, parse_address, remote_fault, same_address
from orchestrrl.cli.output import reporting_errors
from orchestrrl.engines.base import connect
from orchestrrl.errors import Permanent, ProblemFaults
from orchestrrl.gateway.relay import Limits
from orchestrrl.gateway.routing import DEFAULT_POLICY, STRATEGIES, Routing, Slack
from orchestrrl.gateway.service import GatewayOptions, log_to_stderr, serve
from orchestrrl.gateway.store import BATCH_S, Keep
from orchestrrl.gateway.store_file import check
from orchestrrl.gateway.versions import OnStale
from orchestrrl.operations import Route
from planner.model import EngineId, NodeId

MOST_PORT = 65535


def register(app: typer.Typer) -> None:
    app.command(name="gateway", rich_help_panel="Services")(gateway)


def gateway(
    listen: Annotated[str, typer.Option(help="HOST:PORT to serve on; port 0 takes a free one.")] = "127.0.0.1:8000",
    operator: Annotated[
        str,
        typer.Option(
            help="HOST:PORT of the operator API: every request's text, moves, cancellations and the gate. Port 0 takes "
            "a free one; several processes take the port and those after it."
        ),
    ] = "127.0.0.1:0",
    allow_remote: Annotated[
        bool,
        typer.Option(
            "--allow-remote",
            help="Permit a --listen and an --operator that are not loopback: there is no authentication yet.",
        ),
    ] = False,
    engine: Annotated[
        list[str] | None, typer.Option(help="ID=URL of an engine; repeat it. The daemon's routes replace these.")
    ] = None,
    daemon: Annotated[str | None, typer.Option(help="The daemon's address, HOST:PORT or unix:PATH.")] = None,
    policy: Annotated[str, typer.Option(help=" | ".join(STRATEGIES))] = DEFAULT_POLICY,
    affinity: Annotated[
        list[str] | None,
        typer.Option(help="TAG=POOL: requests of this tag prefer the engines of this pool; repeat it."),
    ] = None,
    pool: Annotated[
        list[str] | None, typer.Option(help="ENGINE=POOL of an --engine; repeat it. The daemon's word goes before it.")
    ] = None,
    affinity_slack: Annotated[
        int,
        typer.Option(help="An engine is preferred up to a quarter and this many requests beyond the least loaded one."),
    ] = Slack().requests,
    queue_depth: Annotated[
        int,
        typer.Option(
            help="Let so many requests wait on an engine for their first token, and the others here. 0: all wait there."
        ),
    ] = 0,
    engine_kind: Annotated[str, typer.Option(help="Which engine product the URLs are.")] = "vllm",
    gateway_id: Annotated[str, typer.Option("--id", help="This gateway's name. Default: host name and port.")] = "",
    engine_wait_s: Annotated[float, typer.Option(help="Wait this long for any engine before an error.")] = 30.0,
    stall_s: Annotated[float, typer.Option(help="Leave an engine that makes no token for this long.")] = 120.0,
    report_interval_s: Annotated[float, typer.Option(help="Report to the daemon this often.")] = 0.25,
    drain_s: Annotated[float, typer.Option(help="On SIGTERM, let requests finish for this long.")] = 30.0,
    coalesce_tokens: Annotated[
        int, typer.Option(help="Answers that are not streamed: ask engines for chunks of this many tokens.")
    ] = 8,
    max_version_lag: Annotated[
        int,
        typer.Option(help="End requests whose oldest token is more policy versions behind than this; -1: none."),
    ] = -1,
    on_stale: Annotated[str, typer.Option(help=f"What becomes of these: {' | '.join(OnStale)}.")] = OnStale.ABORT,
    processes: Annotated[
        int, typer.Option(help="Serve with this many processes on one port; the daemon sees each as a gateway.")
    ] = 1,
    plain_http: Annotated[
        bool,
        typer.Option(
            "--plain-http", help="Serve all requests by aiohttp, which costs more, and none by the fast path."
        ),
    ] = False,
    ledger: Annotated[
        Path | None,
        typer.Option(help="Keep what requests with an id have generated in this file: they survive the gateway."),
    ] = None,
    keep_from_s: Annotated[
        float, typer.Option(help="Keep no answer that took less: it is as soon generated again. 0: keep all.")
    ] = BATCH_S,
    keep_answers_s: Annotated[float, typer.Option(help="Keep it for this long after the last token.")] = 3600.0,
    keep_answers_mb: Annotated[float, typer.Option(help="Keep no more than this; the oldest go first.")] = 1024.0,
    log_level: Annotated[str, typer.Option(help="debug | info | warning | error")] = "info",
) -> None:
    """Serve `/v1/completions` and `/v1/chat/completions` in front of engines.

    Example: `orchestrrl gateway --engine e0=http://10.0.0.1:8000 --engine e1=http://10.0.0.2:8000`

    The first line on standard output is the URL that it serves, the second that of the operator API; with several
    processes each has a line. `/version` of either names the operator API as `operator_url`.
    """
    with reporting_errors():
        options = read_options(
            listen=listen,
            operator=operator,
            allow_remote=allow_remote,
            engines=engine or [],
            daemon=daemon,
            policy=policy,
            affinity=affinity or [],
            pools=pool or [],
            affinity_slack=affinity_slack,
            queue_depth=queue_depth,
            engine_kind=engine_kind,
            gateway_id=gateway_id,
            engine_wait_s=engine_wait_s,
            stall_s=stall_s,
            report_interval_s=report_interval_s,
            drain_s=drain_s,
            coalesce_tokens=coalesce_tokens,
            max_version_lag=max_version_lag,
            on_stale=on_stale,
            processes=processes,
            log_level=log_level,
            plain_http=plain_http,
            ledger=ledger,
            keep_from_s=keep_from_s,
            keep_answers_s=keep_answers_s,
            keep_answers_mb=keep_answers_mb,
        )
        log_to_stderr(log_level)
        if processes == 1:
            asyncio.run(serve(options))
            return
        from orchestrrl.gateway.processes import serve_many

        serve_many(options)


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
    affinity_slack: int = Slack().requests,
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
        routing=Routing(policy, tags, Slack(affinity_slack)),
        queue_depth=queue_depth,
        pools={EngineId(name): value for name, value in pool_of.items()},
        limits=Limits(
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
) -> Keep | None:
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
    return Keep(ledger, keep_from_s, keep_answers_s, int(keep_answers_mb * (1 << 20)))


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


def _routes(engines: list[str], faults: list[str]) -> list[Route]:
    routes: list[Route] = []
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
            routes.append(Route(EngineId(name), url.rstrip("/")))
    return routes
