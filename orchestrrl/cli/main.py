"""The `orchestrrl` command: one Typer application, its commands grouped by noun in the modules beside this one."""

import functools
import importlib
import io
import sys
from typing import Any

import typer

from orchestrrl import __version__

_SETTINGS: dict[str, Any] = {
    "name": "orchestrrl",
    "no_args_is_help": True,
    "rich_markup_mode": "markdown",
    "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["-h", "--help"]},
    "help": "Control plane for LLM reinforcement learning: watches vLLM servers, re-plans parallelism, moves requests.",
}


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"orchestrrl {__version__}")
        raise typer.Exit


def _root(
    version: bool = typer.Option(False, "--version", callback=_show_version, is_eager=True, help="Print the version."),
) -> None:
    pass


# Each module has a function `register(app)`, which adds these commands; the order is that of `orchestrrl --help`.
COMMANDS: dict[str, tuple[str, ...]] = {
    "demo": ("demo",),
    "bench": ("bench",),
    "sim": ("sim",),
    "sim_cluster": ("sim",),
    "sim_split": ("sim",),
    "sim_sweep": ("sim",),
    "sim_paper": ("sim",),
    "daemon": ("daemon", "check-config"),
    "gateway": ("gateway",),
    "agent": ("agent",),
    "engine": ("engine",),
    "status": ("status", "workers", "requests", "mode", "move"),
    "engines": ("engines",),
    "top": ("top",),
    "gate": ("gate", "cancel"),
    "moves": ("moves",),
    "plan": ("plan",),
    "plan_solve": ("plan",),
    "plan_render": ("plan",),
    "plan_history": ("plan",),
    "switch": ("switch",),
    "profile": ("profile",),
    "profile_predict": ("profile",),
    "profile_measure": ("profile",),
    "journal": ("journal",),
    "balance": ("balance",),
    "fabric_live": ("fabric",),
    "pauses": ("balancer", "sync", "fabric"),
    "fabric_slack": ("fabric",),
    "fabric_trace": ("fabric",),
    "fabric_check": ("fabric",),
    "fabric_generate": ("fabric",),
    "fabric_show": ("fabric",),
    "fabric_box": ("fabric",),
    "ocs": ("ocs",),
    "ocs_verify": ("ocs",),
    "ocs_emulate": ("ocs",),
    "ocs_conformance": ("ocs",),
    "fabric_allocate": ("fabric",),
    "fabric_place": ("fabric",),
    "fabric_transition": ("fabric",),
    "sync_plan": ("sync",),
    "sync_peer": ("sync",),
    "sync_box": ("sync",),
    "sync_live": ("sync",),
    "sync_publish": ("sync",),
}


@functools.cache
def application(command: str = "") -> typer.Typer:
    """Every command; with `command`, only the module that it lives in: a process imports no more than it runs."""
    app = typer.Typer(callback=_root, **_SETTINGS)
    wanted = [module for module, names in COMMANDS.items() if command in names] or list(COMMANDS)
    for module in wanted if command != "--version" else ():
        importlib.import_module(f"orchestrrl.cli.{module}").register(app)
    return app


def main() -> None:
    if isinstance(sys.stdout, io.TextIOWrapper):  # a name that the terminal cannot show is shown escaped
        sys.stdout.reconfigure(errors="backslashreplace")
    application(sys.argv[1] if len(sys.argv) > 1 else "")()
