"""`orchestrrl agent`: run the sidecar that monitors one or more engines of a host."""

from collections.abc import Coroutine
from pathlib import Path
from socket import gethostname
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from orchestrrl.cli.command import DaemonOption, address_faults, url_faults
from orchestrrl.cli.garbage import keep_loaded
from orchestrrl.cli.output import raise_faults
from orchestrrl.cli.running import VerboseFlag, serve
from orchestrrl.core.addresses import DEFAULT_TARGET, same_address
from orchestrrl.core.errors import Permanent, ProblemFaults

if TYPE_CHECKING:
    from orchestrrl.agent.watch import HealthLimits
    from orchestrrl.engines.base import Engine
    from planner.model import EngineId, NodeId


def agent(
    urls: Annotated[list[str] | None, typer.Option("--url", help="URL of an engine. Can be repeated.")] = None,
    engine: Annotated[str, typer.Option(help="Engine product: vllm or simulated.")] = "vllm",
    ids: Annotated[
        list[str] | None,
        typer.Option("--id", help="Engine id, one for each --url in the same order. Default: the URL's HOST:PORT."),
    ] = None,
    daemon: DaemonOption = DEFAULT_TARGET,
    node_id: Annotated[str, typer.Option(help="The agent's id. Default: agent-, followed by the engine ids.")] = "",
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
    host: Annotated[str, typer.Option(help="Host name to report with --rings. Default: the name of this host.")] = "",
    verbose: VerboseFlag = False,
) -> None:
    """Monitor engines and report their load to the daemon. The command runs until it is stopped.

    With `--rings`, also read the collective boundaries of the traced processes on this host and report windows for
    circuit changes to the daemon (docs/fabric.md). `--url` is then optional.

    Example: `orchestrrl agent --engine vllm --url http://127.0.0.1:8000 --id vllm-0`

    Example: `orchestrrl agent --rings /dev/shm/orchestrrl-rings`
    """
    # Imported here so that help and completion are fast.
    from orchestrrl.agent.probe_link import WindowReporter
    from orchestrrl.agent.watch import HealthLimits
    from orchestrrl.core.clock import WallClock
    from orchestrrl.engines.base import connect
    from orchestrrl.rpc.channel import first_of
    from planner.model import EngineId, NodeId

    urls = urls or []
    faults = [fault for index in range(len(urls)) for fault in _url_faults(urls, index)]
    names = ids or [url if faults else urlsplit(url).netloc for url in urls]
    faults += [*_name_faults(urls, names), *address_faults(daemon)]
    if not urls and rings is None:
        faults.append("--url: is required without --rings")
    if not interval_s > 0:
        faults.append(f"--interval-s: must be > 0, got {interval_s:g}")
    raise_faults(faults)
    try:
        limits = HealthLimits(slow_after_s, gone_after_s, rate_window_s)
        engines = {EngineId(name): connect(engine, url) for name, url in zip(names, urls, strict=True)}
    except ValueError as error:
        raise ProblemFaults([str(error)]) from error
    except Permanent as error:
        raise ProblemFaults([f"--engine: {error}"]) from error
    sides: list[Coroutine[Any, Any, None]] = []
    if engines:
        sides.append(_run(NodeId(node_id or "agent-" + "-".join(names)), engines, daemon, interval_s, limits))
    if rings is not None:
        sides.append(WindowReporter(rings, host or gethostname(), daemon, clock=WallClock()).run())
    keep_loaded()
    serve(first_of(*sides), verbose=verbose)


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


def _url_faults(urls: list[str], index: int) -> list[str]:
    url, option = urls[index], f"--url[{index}]"
    if any(same_address(url, other) for other in urls[:index]):
        return [f"{option}: must be given only once, got {url!r} again"]
    return url_faults(option, url)


def _name_faults(urls: list[str], names: list[str]) -> list[str]:
    faults = []
    if len(names) != len(urls):
        faults.append(f"--id: must be given for each --url or for none, got {len(names)} for {len(urls)}")
    for index, name in enumerate(names):
        if not name and not faults:
            faults.append(f"--id[{index}]: must not be empty")
        if name in names[:index]:
            faults.append(f"--id[{index}]: must be unique, got {name!r} again")
    return faults
