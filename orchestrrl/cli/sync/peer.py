"""`orchestrrl sync peer`: the process that holds weights on one host."""

from dataclasses import field, make_dataclass
from typing import Annotated, Any

import typer

from orchestrrl.cli.command import DaemonOption, with_flags
from orchestrrl.cli.garbage import keep_loaded
from orchestrrl.cli.running import VerboseFlag, serve
from orchestrrl.core.addresses import DEFAULT_TARGET
from orchestrrl.weights.peer.arguments import PeerArguments, PeerOption, options


def _flag(option: PeerOption) -> tuple[str, Any, Any]:
    """Return the name, the annotation and the default of an option as a field."""
    if option.name == "daemon":
        return option.name, DaemonOption, field(default=DEFAULT_TARGET)
    kind: Any = list[option.kind] if option.repeats else option.kind  # type: ignore[name-defined]
    shown = typer.Option(option.flag, metavar=option.metavar, help=option.help)
    if option.required:
        return option.name, Annotated[kind, shown], field()
    if option.repeats or option.default is None:
        return option.name, Annotated[kind | None, shown], field(default=None)
    return option.name, Annotated[kind, shown], field(default=option.default)


PeerFlags = make_dataclass(
    "PeerFlags", [*map(_flag, options()), ("verbose", VerboseFlag, field(default=False))], kw_only=True
)


@with_flags(PeerFlags)
def peer(flags: Any) -> None:
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
    from orchestrrl.weights.peer.settings import settings_of

    given = {name: value for name, value in vars(flags).items() if value is not None and name != "verbose"}
    settings = settings_of(PeerArguments(**given))
    keep_loaded()
    serve(run_peer(settings, WallClock()), verbose=flags.verbose)
