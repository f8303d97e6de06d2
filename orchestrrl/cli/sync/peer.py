"""`orchestrrl sync peer`: the process that holds weights on one host."""

import random
from dataclasses import dataclass
from typing import Annotated

import typer

from orchestrrl.cli.command import with_flags
from orchestrrl.cli.control import DaemonOption
from orchestrrl.cli.garbage import keep_loaded
from orchestrrl.cli.running import VerboseFlag, serve
from orchestrrl.core.addresses import DEFAULT_TARGET


@dataclass(frozen=True, kw_only=True)
class PeerFlags:
    """The options of `orchestrrl sync peer`; those of the peer have the names of its arguments."""

    id: Annotated[str, typer.Option(help="Its name, one of its own in the fleet.")]
    daemon: DaemonOption = DEFAULT_TARGET
    engines: Annotated[
        list[str] | None,
        typer.Option(
            "--engine",
            metavar="NAME=URL",
            help="An engine of this host to install versions into; repeat for several. None: a trainer's host.",
        ),
    ] = None
    engines_here: Annotated[
        bool,
        typer.Option(
            "--engines-here",
            help="Install into all engines of this host, as the daemon tells of them: those that it starts, that are"
            " added, or that agents report.",
        ),
    ] = False
    engines_at: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST[:PORT[-LAST]]",
            help="The same for engines that listen there; repeat for several.",
        ),
    ] = None
    ranks_of: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="An engine of several hosts that has ranks on this one, too, and that another host's peer installs"
            " into: both have the same --folder. Repeat for several.",
        ),
    ] = None
    product: Annotated[str, typer.Option(help="The engines' product: vllm or simulated.")] = "vllm"
    folder: Annotated[
        str,
        typer.Option(
            help="Where versions are held, with room for two. Default: /dev/shm/orchestrrl-weights- and its name."
        ),
    ] = ""
    host: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS", help="This host, as other peers reach it. Default: that of the way towards the daemon."
        ),
    ] = ""
    allow_remote: Annotated[
        bool,
        typer.Option(
            "--allow-remote",
            help="Permit a --host that is not loopback: other peers are believed without authentication.",
        ),
    ] = False
    transports: Annotated[
        list[str] | None,
        typer.Option(
            "--transport",
            help="How bytes may come and go; repeat. Those that cannot be had here are left out. Default: nccl, tcp,"
            " gloo.",
        ),
    ] = None
    gpu: Annotated[int | None, typer.Option(help="A GPU of the fabric's site that is here: says where it is.")] = None
    pod: Annotated[str, typer.Option(help="The PoD that it is in, where no GPU is named.")] = ""
    tor: Annotated[str, typer.Option(help="The ToR that it is at.")] = ""
    nic_gbps: Annotated[float, typer.Option(help="Rate of its NIC. Default: as the daemon is configured.")] = 0.0
    tp: Annotated[int, typer.Option(help="Tensor parallelism of the engines here.")] = 1
    tp_ranks: Annotated[
        list[int] | None, typer.Option("--tp-rank", help="One that is on this host; repeat. Default: all.")
    ] = None
    pp: Annotated[int, typer.Option(help="Pipeline parallelism.")] = 1
    pp_ranks: Annotated[list[int] | None, typer.Option("--pp-rank", help="One that is on this host.")] = None
    ep: Annotated[int, typer.Option(help="Expert parallelism.")] = 1
    ep_ranks: Annotated[list[int] | None, typer.Option("--ep-rank", help="One that is on this host.")] = None
    poll_engines_s: Annotated[float, typer.Option(help="Engines are asked so often which weights they have.")] = 2.0
    verbose: VerboseFlag = False


@with_flags(PeerFlags)
def peer(flags: PeerFlags) -> None:
    """Hold weights on one host: receive versions, pass them on, and install them into the engines here.

    One for each host, beside a trainer or beside engines; it does what the daemon orders. It holds versions in a
    folder, by default in memory, and finds them there when it is started again, by their checksums. Trainers stage into
    the same folder. Killing it, the daemon, a trainer or an engine loses nothing that is held.

    In an environment without our dependencies (a trainer's, or vLLM's) the same is `python -m
    orchestrrl.weights.peer.main`, with our package on the path. It needs grpcio, protobuf, pydantic, aiohttp,
    prometheus-client, numpy and xxhash there, and torch for the transports gloo and nccl; tcp needs nothing else.

    Example: `orchestrrl sync peer --id train0 --daemon 10.0.0.1:7070 --allow-remote --pod train0 --tor train0-tor0`

    Where engines come and go, `--engines-here` has the daemon tell which there are.

    Example: `orchestrrl sync peer --id gen1 --daemon 10.0.0.1:7070 --allow-remote --engines-here --tp 8`

    Example: `orchestrrl sync peer --id gen0 --daemon 10.0.0.1:7070 --allow-remote --engine e0=http://127.0.0.1:8000
    --tp 8`
    """
    # Imported here so that no other command waits for numpy.
    from orchestrrl.core.clock import WallClock
    from orchestrrl.weights.peer.peer import run_peer
    from orchestrrl.weights.peer.settings import PeerArguments, settings_of

    given = {name: value for name, value in vars(flags).items() if value is not None and name != "verbose"}
    settings = settings_of(PeerArguments(**given))
    keep_loaded()
    serve(run_peer(settings, WallClock(), random.Random()), verbose=flags.verbose)
