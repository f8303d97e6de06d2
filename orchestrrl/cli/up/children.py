"""The processes that `orchestrrl up` runs, with their command lines. Pure."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

from orchestrrl.cli.gateway import ServingFlags
from orchestrrl.cli.main import load

STOP_WITHIN_S = 15.0
DRAINED_WITHIN_S = 15.0  # beyond the drain time of the gateway


@dataclass(frozen=True, slots=True)
class ChildCommand:
    """A process to run. If `prints_address` is True, the process is ready when it prints its address, as a line on
    standard output. If not, it is ready when it has started. The process is killed if it does not exit within
    `stop_within_s` seconds of SIGTERM."""

    name: str
    words: tuple[str, ...]  # the program and its arguments
    prints_address: bool = True
    stop_within_s: float = STOP_WITHIN_S


def gateway_command(flags: ServingFlags, daemon: str) -> ChildCommand:
    words = ("gateway", "--daemon", daemon, *_serving_words(flags))
    return ChildCommand("gateway", _orchestrrl(*words), stop_within_s=flags.drain_s + DRAINED_WITHIN_S)


def agent_command(flags: ServingFlags, daemon: str, agent_id: str) -> ChildCommand:
    engines = (word for engine in flags.engines or () for word in ("--engine", engine))
    more = ("--engine-kind", flags.engine_kind, "--log-level", flags.log_level)
    words = ("agent", "--daemon", daemon, "--id", agent_id, *engines, *more)
    return ChildCommand("agent", _orchestrrl(*words), prints_address=False)


def daemon_command(flags: ServingFlags, daemon: str, config: Path, mode: str | None) -> ChildCommand:
    words = ["daemon", "--config", str(config), "--listen", daemon, "--log-level", flags.log_level]
    words += ["--mode", mode] if mode is not None else []
    words += ["--allow-remote"] if flags.allow_remote else []
    return ChildCommand("daemon", _orchestrrl(*words))


def _orchestrrl(*words: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "orchestrrl", *words)


def _serving_words(flags: ServingFlags) -> Iterator[str]:
    """Yield the command-line words that set all fields of ServingFlags to their values in `flags`."""
    option_of = {parameter.name: parameter.opts[0] for parameter in load("gateway").params}
    for each in fields(ServingFlags):
        option, value = option_of[each.name], getattr(flags, each.name)
        if isinstance(value, bool):
            yield from (option,) if value else ()
        else:
            for item in value if isinstance(value, list) else [] if value is None else [value]:
                yield from (option, str(item))
