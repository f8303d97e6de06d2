"""`orchestrrl gateway`: serve OpenAI's endpoints in front of the engines."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from orchestrrl.cli.command import with_flags
from orchestrrl.cli.garbage import keep_loaded


@dataclass(frozen=True, kw_only=True)
class GatewayFlags:
    """The options of `orchestrrl gateway`, as they are given."""

    listen: Annotated[str, typer.Option(help="HOST:PORT to serve on; port 0 takes a free one.")] = "127.0.0.1:8000"
    operator: Annotated[
        str,
        typer.Option(
            help="HOST:PORT of the operator API: every request's text, moves, cancellations, pauses. Port 0 takes "
            "a free one; several processes take the port and those after it."
        ),
    ] = "127.0.0.1:0"
    allow_remote: Annotated[
        bool,
        typer.Option(
            "--allow-remote",
            help="Permit a --listen and an --operator that are not loopback: there is no authentication yet.",
        ),
    ] = False
    engines: Annotated[
        list[str] | None,
        typer.Option("--engine", help="ID=URL of an engine; repeat it. The daemon's routes replace these."),
    ] = None
    daemon: Annotated[str | None, typer.Option(help="The daemon's address, HOST:PORT or unix:PATH.")] = None
    policy: Annotated[str, typer.Option(help="load_index | least_tokens | prefix_affinity | round_robin")] = (
        "load_index"
    )
    affinity: Annotated[
        list[str] | None,
        typer.Option(help="TAG=POOL: requests of this tag prefer the engines of this pool; repeat it."),
    ] = None
    pools: Annotated[
        list[str] | None,
        typer.Option("--pool", help="ENGINE=POOL of an --engine; repeat it. The daemon's word goes before it."),
    ] = None
    affinity_slack: Annotated[
        int,
        typer.Option(help="An engine is preferred up to a quarter and this many requests beyond the least loaded one."),
    ] = 8
    queue_depth: Annotated[
        int,
        typer.Option(
            help="Let so many requests wait on an engine for their first token, and the others here. 0: all wait there."
        ),
    ] = 0
    engine_kind: Annotated[str, typer.Option(help="Which engine product the URLs are.")] = "vllm"
    gateway_id: Annotated[str, typer.Option("--id", help="This gateway's name. Default: host name and port.")] = ""
    engine_wait_s: Annotated[float, typer.Option(help="Wait this long for any engine before an error.")] = 30.0
    stall_s: Annotated[float, typer.Option(help="Leave an engine that makes no token for this long.")] = 120.0
    report_interval_s: Annotated[float, typer.Option(help="Report to the daemon this often.")] = 0.25
    drain_s: Annotated[float, typer.Option(help="On SIGTERM, let requests finish for this long.")] = 30.0
    coalesce_tokens: Annotated[
        int, typer.Option(help="Answers that are not streamed: ask engines for chunks of this many tokens.")
    ] = 8
    processes: Annotated[
        int, typer.Option(help="Serve with this many processes on one port; the daemon sees each as a gateway.")
    ] = 1
    ledger: Annotated[
        Path | None,
        typer.Option(help="Keep what requests with an id have generated in this file: they survive the gateway."),
    ] = None
    keep_from_s: Annotated[
        float, typer.Option(help="Keep no answer that took less: it is as soon generated again. 0: keep all.")
    ] = 0.2
    keep_answers_s: Annotated[float, typer.Option(help="Keep it for this long after the last token.")] = 3600.0
    keep_answers_mb: Annotated[float, typer.Option(help="Keep no more than this; the oldest go first.")] = 1024.0
    log_level: Annotated[str, typer.Option(help="debug | info | warning | error")] = "info"


@with_flags(GatewayFlags)
def gateway(flags: GatewayFlags) -> None:
    """Serve `/v1/completions` and `/v1/chat/completions` in front of engines.

    Example: `orchestrrl gateway --engine e0=http://10.0.0.1:8000 --engine e1=http://10.0.0.2:8000`

    The first line on standard output is the URL that it serves, the second that of the operator API; with several
    processes each has a line. `/version` of either names the operator API as `operator_url`.
    """
    # Imported here so that help and completion need none of it.
    import asyncio

    from orchestrrl.cli.gateway_options import read_options
    from orchestrrl.gateway.service import log_to_stderr, serve, serve_many

    options = read_options(flags)
    log_to_stderr(flags.log_level)
    keep_loaded()
    if flags.processes == 1:
        asyncio.run(serve(options))
    else:
        serve_many(options)
