"""`orchestrrl sync peer`: run the process that stores weight versions on one host."""

from dataclasses import field, make_dataclass
from typing import Annotated, Any

import typer

from orchestrrl.cli.command import DaemonOption, with_flags
from orchestrrl.cli.garbage import keep_loaded
from orchestrrl.cli.output import raise_faults
from orchestrrl.cli.running import LogLevelOption, log_level_faults, serve
from orchestrrl.core.addresses import DEFAULT_TARGET
from orchestrrl.weights.peer.arguments import PeerArguments, PeerOption, options


def _flag(option: PeerOption) -> tuple[str, Any, Any]:
    """Return the name, annotation and default value of the dataclass field that represents an option."""
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
    "PeerFlags", [*map(_flag, options()), ("log_level", LogLevelOption, field(default="warning"))], kw_only=True
)


@with_flags(PeerFlags)
def peer(flags: Any) -> None:
    """Store weight versions on one host: receive them, forward them, and install them into the host's engines.

    Run one peer on each host of a trainer or of engines. The peer carries out the daemon's orders. Versions are stored
    in a folder, by default in memory, and verified by checksum after a restart. Trainers stage their weights in the
    same folder. No stored version is lost if the peer, the daemon, a trainer or an engine is killed.

    In a trainer's or vLLM's environment, install `orchestrrl-client` and run `python -m orchestrrl.weights.peer.main`.
    The transports gloo and nccl require torch, but tcp does not.

    Example: `orchestrrl sync peer --id train0 --daemon 10.0.0.1:7070 --allow-remote --pod train0 --tor train0-tor0`

    If engines are added and removed at run time, use `--engines-here`: the daemon sends the list of engines.

    Example: `orchestrrl sync peer --id gen1 --daemon 10.0.0.1:7070 --allow-remote --engines-here --tp 8`

    Example: `orchestrrl sync peer --id gen0 --daemon 10.0.0.1:7070 --allow-remote --engine e0=http://127.0.0.1:8000
    --tp 8`
    """
    # Imported here so that other commands start without numpy.
    from orchestrrl.core.clock import WallClock
    from orchestrrl.weights.peer.peer import run_peer
    from orchestrrl.weights.peer.settings import settings_of

    given = {name: value for name, value in vars(flags).items() if value is not None and name != "log_level"}
    raise_faults(log_level_faults(flags.log_level))
    settings = settings_of(PeerArguments(**given))
    keep_loaded()
    serve(run_peer(settings, WallClock()), flags.log_level)
