"""`orchestrrl daemon` and `orchestrrl check-config`: run the daemon, and validate its configuration file."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrrl.cli.command import AllowRemoteFlag, command, listen_address
from orchestrrl.cli.garbage import keep_loaded
from orchestrrl.cli.output import Output, cells_table, fail, print_line, print_view, raise_faults
from orchestrrl.cli.running import LogLevelOption, log_level_faults, serve
from planner.model import Mode

if TYPE_CHECKING:
    from orchestrrl.core.config.schema import Config

NO_CONFIG = Path(os.devnull)  # an empty file is a valid configuration
ConfigOption = Annotated[
    Path, typer.Option("--config", "-c", show_default=False, metavar="FILE", help="The configuration file (YAML).")
]
ModeOverride = Annotated[Mode | None, typer.Option(help="Override the mode in the file.")]


def daemon(
    config: ConfigOption = NO_CONFIG,
    mode: ModeOverride = None,
    listen: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Override the address in the file. Port 0: a free port.")
    ] = None,
    allow_remote: AllowRemoteFlag = False,
    log_level: LogLevelOption = "warning",
) -> None:
    """Run the daemon: monitor the fleet, make decisions and, in mode act, carry them out. SIGHUP reloads the file.

    The daemon runs until it is stopped. The first line on standard output is the address on which it listens. Without
    `--config`, all settings have their defaults.

    Example: `orchestrrl daemon -c orchestrrl.yaml --mode act`
    """
    # Imported here so that the other commands start without the planner's numerical libraries.
    from orchestrrl.core.clock import WallClock
    from orchestrrl.daemon.configuration import ReloadableConfig
    from orchestrrl.daemon.running import run_daemon

    faults = log_level_faults(log_level)
    if listen is not None:
        listen_address("--listen", listen, allow_remote, faults)
    raise_faults(faults)
    file = ReloadableConfig.load(config)
    serve(run_daemon(file, WallClock(), _announce, mode, listen), log_level)


def _announce(address: str) -> None:
    keep_loaded()
    print_line(address)


@command
def check_config(
    file: Annotated[Path | None, typer.Argument(help="The configuration file (YAML).")] = None,
    print_example: Annotated[bool, typer.Option("--print-example", help="Print a commented example and exit.")] = False,
) -> Output:
    """Validate a configuration file and print its settings. If it is invalid, print all errors and exit with status 2.

    Example: `orchestrrl check-config --print-example > orchestrrl.yaml && orchestrrl check-config orchestrrl.yaml`
    """
    from orchestrrl.core.config.example import EXAMPLE
    from orchestrrl.daemon.configuration import load_config

    if print_example:
        print_view(EXAMPLE)
        raise typer.Exit
    if file is None:
        fail("FILE: is required; `--print-example` prints a complete example", 2)
    config = load_config(file, with_parts=True)
    shown = cells_table("configuration", ("setting", "value"), _rows(config))
    return Output(config.model_dump(mode="json"), [shown, "no errors"])


def _rows(config: "Config") -> list[tuple[str, str | None]]:
    listen, fast, slow = config.listen, config.fast, config.slow
    where = f"{listen.address}" + (f" and {listen.socket}" if listen.socket else "")
    acting = "makes and explains decisions, changes nothing"
    deployer = config.fleet.deployer
    if config.mode is Mode.ACT:
        acting = "moves requests" + ("" if deployer is None else ", redeploys engines")
    return [
        ("mode", f"{config.mode}: {acting}"),
        ("listens on", where),
        ("journal", f"{config.journal.path}, at most {config.journal.max_entries} entries"),
        ("metrics", f"http://{config.metrics.address}/metrics" if config.metrics else "none"),
        ("fast loop", f"every {fast.interval_s:g} s, theta {fast.theta:g}, {fast.max_moves_per_tick} moves a tick"),
        ("slow loop", f"every {slow.interval_s:g} s, gain over {slow.epsilon_s:g} s, cooldown {slow.cooldown_s:g} s"),
        ("GPUs", f"{config.fleet.gpus.count} in nodes of {config.fleet.gpus.per_node}" if config.fleet.gpus else None),
        ("configurations", ", ".join(entry.id for entry in config.fleet.configuration_values()) or None),
        ("engines", ", ".join(f"{entry.id} at {entry.url}" for entry in config.fleet.engines) or "as agents report"),
        ("deployer", f"{deployer.product}, records in {deployer.folder}" if deployer else None),
        ("switches", ", ".join(f"{entry.id} ({entry.driver})" for entry in config.ocs) or None),
    ]
