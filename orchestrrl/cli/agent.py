"""`orchestrrl agent`: run the sidecar that monitors one or more engines of a host."""

from collections.abc import Coroutine
from pathlib import Path
from socket import gethostname
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrrl.cli.command import (
    DaemonOption,
    EngineKindOption,
    EngineOption,
    address_faults,
    engine_kind_faults,
)
from orchestrrl.cli.garbage import keep_loaded
from orchestrrl.cli.output import raise_faults
from orchestrrl.cli.running import LogLevelOption, log_level_faults, serve
from orchestrrl.core.addresses import DEFAULT_TARGET

if TYPE_CHECKING:
    from orchestrrl.agent.watch import HealthLimits
    from orchestrrl.engines.base import Engine
    from planner.model import EngineId, NodeId


def agent(
    engines: EngineOption = None,
    engine_kind: EngineKindOption = "vllm",
    daemon: DaemonOption = DEFAULT_TARGET,
    agent_id: Annotated[
        str, typer.Option("--id", help="The name of this agent. Default: agent-, followed by the engine ids.")
    ] = "",
    interval_s: Annotated[float, typer.Option(help="Seconds between scrapes of an engine.")] = 0.25,
    slow_after_s: Annotated[
        float, typer.Option(help="Response time in seconds above which an engine is marked slow.")
    ] = 1.0,
    gone_after_s: Annotated[
        float, typer.Option(help="Seconds without a response after which an engine is marked gone.")
    ] = 5.0,
    rate_window_s: Annotated[float, typer.Option(help="Seconds over which the decode rate is averaged.")] = 1.0,
    rings: Annotated[
        Path | None,
        typer.Option(help="Also report pauses between the collectives recorded in this folder.", metavar="FOLDER"),
    ] = None,
    host_name: Annotated[
        str, typer.Option(help="Host name to report with --rings. Default: the name of this host.")
    ] = "",
    log_level: LogLevelOption = "warning",
) -> None:
    """Monitor engines and report their load to the daemon. The command runs until it is stopped.

    With `--rings`, also read the collective boundaries of the traced processes on this host and report windows for
    circuit changes to the daemon (docs/fabric.md). `--engine` is then optional.

    Example: `orchestrrl agent --engine vllm-0=http://127.0.0.1:8000`

    Example: `orchestrrl agent --rings /dev/shm/orchestrrl-rings`
    """
    # Imported here so that help and completion are fast.
    from orchestrrl.agent.probe_link import WindowReporter
    from orchestrrl.agent.watch import HealthLimits
    from orchestrrl.core.clock import WallClock
    from orchestrrl.core.engine_arguments import parse_engines
    from orchestrrl.engines.base import connect
    from orchestrrl.rpc.channel import first_of
    from planner.model import NodeId

    faults = [*address_faults(daemon), *engine_kind_faults(engine_kind), *log_level_faults(log_level)]
    urls = parse_engines(engines or [], faults)
    if not engines and rings is None:
        faults.append("--engine: is required without --rings")
    if not interval_s > 0:
        faults.append(f"--interval-s: must be > 0, got {interval_s:g}")
    try:
        limits = HealthLimits(slow_after_s, gone_after_s, rate_window_s)
    except ValueError as error:
        faults.append(str(error))
    raise_faults(faults)
    clients = {engine: connect(engine_kind, url) for engine, url in urls.items()}
    sides: list[Coroutine[Any, Any, None]] = []
    if clients:
        sides.append(_run(NodeId(agent_id or "agent-" + "-".join(clients)), clients, daemon, interval_s, limits))
    if rings is not None:
        sides.append(WindowReporter(rings, host_name or gethostname(), daemon, clock=WallClock()).run())
    keep_loaded()
    serve(first_of(*sides), log_level)


async def _run(
    node_id: "NodeId", engines: "dict[EngineId, Engine]", daemon: str, interval_s: float, limits: "HealthLimits"
) -> None:
    from orchestrrl.agent.host import with_host_facts
    from orchestrrl.agent.sidecar import Agent
    from orchestrrl.core.clock import WallClock

    sidecar = Agent(
        node_id,
        engines,
        daemon,
        clock=WallClock(),
        interval_s=interval_s,
        limits=limits,
        describe=with_host_facts,
    )
    try:
        await sidecar.run()
    finally:
        for engine in engines.values():
            await engine.close()
