"""`orchestrrl gateway`: serve the OpenAI API in front of the engines."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from orchestrrl.cli.command import AllowRemoteFlag, EngineKindOption, with_flags
from orchestrrl.cli.garbage import keep_loaded
from orchestrrl.cli.running import LogLevelOption


@dataclass(frozen=True, kw_only=True)
class ServingFlags:
    """The options of `orchestrrl gateway` that `orchestrrl up` has, too."""

    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Address to listen on. Port 0 selects a free port.")
    ] = "127.0.0.1:8000"
    engines: Annotated[
        list[str] | None,
        typer.Option(
            "--engine",
            metavar="[ID=]URL",
            help="An engine. Can be repeated. Default id: the URL's HOST:PORT. The daemon's routes replace these.",
        ),
    ] = None
    engine_kind: EngineKindOption = "vllm"
    operator: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            help="Address of the operator API: the text of every request, moves, cancellations, pauses. Port 0 "
            "selects a free port. With --processes N, N consecutive ports are used.",
        ),
    ] = "127.0.0.1:0"
    allow_remote: AllowRemoteFlag = False
    policy: Annotated[str, typer.Option(help="load_index | least_tokens | prefix_affinity | round_robin")] = (
        "load_index"
    )
    reseed: Annotated[
        bool,
        typer.Option(
            "--reseed",
            help="Let requests with a seed move and fail over. They continue with a seed derived from their own, which "
            "the answer states. The header X-Reseed: true or false overrides this. Recommended for RL.",
        ),
    ] = False
    drain_s: Annotated[float, typer.Option(help="Seconds that running requests have to finish after SIGTERM.")] = 30.0
    processes: Annotated[
        int, typer.Option(help="Processes that serve the port. The daemon treats each as one gateway.")
    ] = 1
    ledger: Annotated[
        Path | None,
        typer.Option(help="Store the tokens of requests with an id in this file. They survive a gateway restart."),
    ] = None
    log_level: LogLevelOption = "info"


@dataclass(frozen=True, kw_only=True)
class GatewayFlags(ServingFlags):
    """The options of `orchestrrl gateway`, before validation."""

    daemon: Annotated[str | None, typer.Option(metavar="ADDRESS", help="Daemon address: HOST:PORT or unix:PATH.")] = (
        None
    )
    affinity: Annotated[
        list[str] | None,
        typer.Option(help="TAG=POOL: requests with this tag prefer the engines of this pool. Can be repeated."),
    ] = None
    pools: Annotated[
        list[str] | None,
        typer.Option(
            "--engine-pool", help="ENGINE=POOL of an --engine. Can be repeated. The daemon's pools take precedence."
        ),
    ] = None
    affinity_slack: Annotated[
        int,
        typer.Option(help="Prefer an engine until it has 25 % plus this many requests more than the least loaded one."),
    ] = 8
    queue_depth: Annotated[
        int,
        typer.Option(
            help="Maximum requests that wait on an engine for their first token; others wait here. 0: no limit."
        ),
    ] = 0
    session_ttl_s: Annotated[
        float,
        typer.Option(help="Seconds for which a session keeps its engine after its last token. 0: ignore session ids."),
    ] = 600.0
    gateway_id: Annotated[str, typer.Option("--id", help="The name of this gateway. Default: host name and port.")] = ""
    engine_wait_s: Annotated[
        float, typer.Option(help="Seconds that a request waits for an available engine before it fails.")
    ] = 30.0
    stall_s: Annotated[float, typer.Option(help="Seconds without a token after which a request leaves its engine.")] = (
        120.0
    )
    report_interval_s: Annotated[float, typer.Option(help="Seconds between reports to the daemon.")] = 0.25
    coalesce_tokens: Annotated[
        int, typer.Option(help="Tokens per chunk requested from engines for responses that are not streamed.")
    ] = 8
    keep_from_s: Annotated[
        float,
        typer.Option(help="Store only responses that took at least this many seconds to generate. 0: store all."),
    ] = 0.2
    keep_answers_s: Annotated[float, typer.Option(help="Seconds that a response is stored after its last token.")] = (
        3600.0
    )
    keep_answers_mb: Annotated[
        float, typer.Option(help="Maximum size of the stored responses in MiB. The oldest are deleted first.")
    ] = 1024.0


@with_flags(GatewayFlags)
def gateway(flags: GatewayFlags) -> None:
    """Serve `/v1/completions`, `/v1/chat/completions` and `/inference/v1/generate` in front of engines.

    Example: `orchestrrl gateway --engine e0=http://10.0.0.1:8000 --engine e1=http://10.0.0.2:8000`

    The first line on standard output is the URL of the gateway. The second line is the URL of the operator API. If
    there are several processes, each process prints a line for its operator API. `/version` returns the URL of the
    operator API as `operator_url`.
    """
    # Imported here so that help and completion are fast.
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
